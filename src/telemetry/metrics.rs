//! `metrics.jsonl`: one JSON object a line, floats that read back to the same bits.

use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Write as _};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Deserializer, Serialize};

use super::times::Times;
use crate::error::{Error, Result};

/// One training step.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Step {
    /// Number of the step, from 1.
    pub step: u64,
    /// Passes over the training data so far.
    pub epoch: f64,
    /// Tokens seen so far.
    pub tokens: u64,
    /// Mean loss of the global batch; null when it is not finite.
    #[serde(deserialize_with = "null_is_nan")]
    pub loss: f64,
    /// Learning rate.
    pub lr: f64,
    /// Global norm of the gradient before clipping; null when it is not finite.
    #[serde(deserialize_with = "null_is_nan")]
    pub grad_norm: f64,
    /// Whether the update was left out because loss or gradient was not finite.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub skipped: bool,
    /// Duration of the step.
    pub step_ms: f64,
    /// Of it, forwards, backwards and sums on rank 0: the rest besides the three below. See [`Times`] for all five.
    #[serde(default)]
    pub compute_ms: f64,
    /// Of it, compute of rank 0 was blocked, waiting for messages.
    #[serde(default)]
    pub comm_exposed_ms: f64,
    /// Meanwhile, communication of rank 0 that compute hid.
    #[serde(default)]
    pub comm_hidden_ms: f64,
    /// Of it, rank 0 waited for data.
    #[serde(default)]
    pub loader_ms: f64,
    /// Of it, the update on rank 0.
    #[serde(default)]
    pub optimizer_ms: f64,
    /// Tokens of this step over its duration; null where no time passed.
    #[serde(deserialize_with = "null_is_nan")]
    pub tokens_per_second: f64,
    /// Model TFLOP/s per rank: [`Efficiency`](super::efficiency::Efficiency).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tflops_per_rank: Option<f64>,
    /// Model FLOPs utilisation, from 0 to 1; absent where the peak of a rank's device is unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mfu: Option<f64>,
    /// Joules per prediction (token or sample) since the last record that has them, evaluations and saves included; every
    /// `log.every` steps, where all nodes have energy counters.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub joules_per_token: Option<f64>,
    /// Energy of the run so far in kWh, earlier starts and steps that were taken again included; likewise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub energy_kwh: Option<f64>,
    /// The most bytes that rank 0 held at once so far, all categories together.
    #[serde(default)]
    pub peak_bytes: usize,
    /// Seconds since 1970.
    pub time: f64,
}

impl Step {
    /// The record with where its time went.
    #[must_use]
    pub fn with(self, times: Times) -> Self {
        Self {
            compute_ms: times.compute * 1e3,
            comm_exposed_ms: times.comm_exposed * 1e3,
            comm_hidden_ms: times.comm_hidden * 1e3,
            loader_ms: times.loader * 1e3,
            optimizer_ms: times.optimizer * 1e3,
            ..self
        }
    }
}

/// A number that JSON has written as null, because it was not finite, read as one that is none.
///
/// # Errors
/// It is neither a number nor null.
pub fn null_is_nan<'de, D: Deserializer<'de>>(from: D) -> std::result::Result<f64, D::Error> {
    Ok(Option::deserialize(from)?.unwrap_or(f64::NAN))
}

/// The energy that the newest record at `path` with one gives, in kWh; 0 without such a record.
///
/// # Errors
/// Returns an error if the file is there and cannot be read.
pub fn energy_so_far(path: &Path) -> Result<f64> {
    #[derive(Deserialize)]
    struct Energy {
        energy_kwh: f64,
    }
    let records = match std::fs::read(path) {
        Ok(records) => records,
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(0.0),
        Err(e) => return Err(Error::io("read", path, e)),
    };
    let newest = records.rsplit(|byte| *byte == b'\n').find_map(|line| serde_json::from_slice::<Energy>(line).ok());
    Ok(newest.map_or(0.0, |newest| newest.energy_kwh))
}

/// A file of JSON lines.
pub struct JsonLines {
    path: PathBuf,
    file: File,
    /// Bytes that are not in the file yet: the file system refused them, and is asked again with the next line.
    waiting: Vec<u8>,
}

impl JsonLines {
    /// Opens `path` to append, first dropping the lines after step `last`: a resumed run writes them again.
    ///
    /// # Errors
    /// The file system refused.
    pub fn open(path: &Path, last: u64) -> Result<Self> {
        #[derive(Deserialize)]
        struct Numbered {
            step: u64,
        }
        let old = match std::fs::read(path) {
            Ok(old) => Some(old),
            Err(e) if e.kind() == ErrorKind::NotFound => None,
            Err(e) => return Err(Error::io("read", path, e)),
        };
        if let Some(old) = old {
            let mut text = Vec::with_capacity(old.len());
            let mut damaged = 0;
            let mut lines = old.split(|byte| *byte == b'\n').peekable();
            while let Some(line) = lines.next() {
                // A value that is not looked at may be no text.
                let text_of = std::str::from_utf8(line).map_err(|e| e.to_string());
                match text_of.and_then(|line| serde_json::from_str::<Numbered>(line).map_err(|e| e.to_string())) {
                    Ok(numbered) if numbered.step <= last => text.extend([line, b"\n"].concat()),
                    Ok(_) => {}
                    // The last one was torn by a kill, or is empty.
                    Err(_) => damaged += u64::from(lines.peek().is_some()),
                }
            }
            if damaged > 0 {
                log::warn!("{}: {damaged} damaged lines left out", path.display());
            }
            // Always another file: a process that still writes to the old one, without a right to, does no harm.
            let temporary = path.with_extension("jsonl.tmp");
            std::fs::write(&temporary, text)
                .and_then(|()| File::open(&temporary)?.sync_all())
                .and_then(|()| std::fs::rename(&temporary, path))
                .map_err(|e| Error::io("rewrite", path, e))?;
        }
        let file = OpenOptions::new().create(true).append(true).open(path).map_err(|e| Error::io("open", path, e))?;
        Ok(Self { path: path.to_path_buf(), file, waiting: Vec::new() })
    }

    /// Appends one line.
    ///
    /// # Errors
    /// The file system refused. The line, or the rest of it, waits for the next call.
    pub fn write(&mut self, record: &impl Serialize) -> Result<()> {
        let mut line = serde_json::to_string(record).map_err(|e| Error::internal(format!("metrics: {e}")))?;
        line.push('\n');
        self.waiting.extend(line.into_bytes());
        self.flush()
    }

    /// Appends all that waits.
    ///
    /// # Errors
    /// The file system refused.
    pub fn flush(&mut self) -> Result<()> {
        let refused = |e| Error::io("write", &self.path, e);
        while !self.waiting.is_empty() {
            match self.file.write(&self.waiting) {
                Ok(0) => return Err(refused(ErrorKind::WriteZero.into())),
                Ok(written) => drop(self.waiting.drain(..written)),
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(refused(e)),
            }
        }
        Ok(())
    }

    /// Opens the file anew, if it has become another one by its name: network file systems forget files that are open.
    ///
    /// # Errors
    /// The file system refused.
    pub fn reopen(&mut self) -> Result<()> {
        let refused = |e| Error::io("open", &self.path, e);
        self.file = OpenOptions::new().create(true).append(true).open(&self.path).map_err(refused)?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(step: u64, loss: f64) -> Step {
        Step {
            step,
            epoch: 0.1,
            tokens: 64,
            loss,
            lr: 1e-3,
            grad_norm: 1.0 / 3.0,
            skipped: false,
            step_ms: 1.5,
            tokens_per_second: 1e5,
            peak_bytes: 1 << 40,
            time: 1.7e9,
            ..Step::default()
        }
    }

    #[test]
    fn steps_of_older_versions_read_back() {
        let old = "{\"step\":3,\"epoch\":0.1,\"tokens\":64,\"loss\":1.0,\"lr\":0.001,\"grad_norm\":0.5,\
                   \"step_ms\":1.5,\"tokens_per_second\":1e5,\"time\":1.7e9}";
        let step: Step = serde_json::from_str(old).unwrap();
        assert_eq!((step.step, step.compute_ms, step.optimizer_ms), (3, 0.0, 0.0));
    }

    #[test]
    fn losses_that_are_not_finite_read_back() {
        let line =
            serde_json::to_string(&Step { skipped: true, grad_norm: f64::INFINITY, ..step(3, f64::NAN) }).unwrap();
        let back: Step = serde_json::from_str(&line).unwrap();
        assert!(line.contains("\"loss\":null") && back.loss.is_nan() && back.grad_norm.is_nan() && back.skipped);
    }

    #[test]
    fn floats_read_back_to_the_same_bits() {
        let before = step(1, 0.1f64 + 0.2);
        let after: Step = serde_json::from_str(&serde_json::to_string(&before).unwrap()).unwrap();
        assert_eq!(after.loss.to_bits(), before.loss.to_bits());
        assert_eq!(after, before);
    }

    #[test]
    fn reopening_drops_what_will_be_written_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics.jsonl");
        let mut lines = JsonLines::open(&path, 0).unwrap();
        (1..=4).for_each(|i| lines.write(&step(i, 1.0)).unwrap());
        drop(lines);
        // A torn last line, as a killed run leaves it.
        OpenOptions::new().append(true).open(&path).unwrap().write_all(b"{\"step\":2,\"lo").unwrap();
        JsonLines::open(&path, 2).unwrap().write(&step(3, 2.0)).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        let steps: Vec<Step> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(steps.iter().map(|s| (s.step, s.loss)).collect::<Vec<_>>(), [(1, 1.0), (2, 1.0), (3, 2.0)]);
    }

    #[test]
    fn damage_costs_its_line_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics.jsonl");
        let mut lines = JsonLines::open(&path, 0).unwrap();
        (1..=4).for_each(|i| lines.write(&step(i, 1.0)).unwrap());
        let mut bytes = std::fs::read(&path).unwrap();
        let second = bytes.iter().position(|byte| *byte == b'\n').unwrap() + 4;
        bytes[second] = 0xff;
        // In a value that nobody looks at, on the way to other programs.
        bytes.extend(b"{\"step\":3,\"note\":\"\xff\"}\n");
        std::fs::write(&path, bytes).unwrap();
        JsonLines::open(&path, 3).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        let steps: Vec<u64> = text.lines().map(|line| serde_json::from_str::<Step>(line).unwrap().step).collect();
        assert_eq!(steps, [1, 3]);
        // An unreadable file is not written anew.
        std::fs::remove_file(&path).unwrap();
        std::fs::create_dir(&path).unwrap();
        assert!(JsonLines::open(&path, 3).is_err_and(|e| e.to_string().contains("cannot read")));
    }
}
