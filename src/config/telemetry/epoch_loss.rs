//! The mean training loss of an epoch, by which checkpoints are compared if there is no validation
//! data.

use std::collections::VecDeque;
use std::io::ErrorKind;
use std::path::Path;

use serde::Deserialize;

use super::long_lines::{FromEnd, parse_record};
use hpctrain_base::error::{Error, Result};
use hpctrain_base::safe_open;

/// The losses of the last steps, as many as an epoch has.
#[derive(Debug, Clone)]
pub struct EpochLoss {
    losses: VecDeque<f64>,
    steps: usize,
}

impl EpochLoss {
    /// Creates an empty window for epochs of `steps` steps.
    pub fn new(steps: u64) -> Self {
        Self { losses: VecDeque::new(), steps: steps.max(1) as usize }
    }

    /// Adds the last steps in `metrics.jsonl`, which are those before a restart. Logs damaged lines
    /// among them.
    ///
    /// # Errors
    /// Returns an error if the file is there and cannot be read.
    pub fn with_records(mut self, metrics: &Path) -> Result<Self> {
        #[derive(Deserialize)]
        struct Line {
            loss: Option<f64>,
        }
        let unread = |e| Error::io("read", metrics, e);
        let file = match safe_open::open(metrics) {
            Ok(file) => file,
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(self),
            Err(e) => return Err(unread(e)),
        };
        let mut lines = FromEnd::new(file).map_err(unread)?;
        let mut damaged = 0;
        while self.losses.len() < self.steps
            && let Some(line) = lines.previous().map_err(unread)?
        {
            match parse_record(line.text) {
                Some(Line { loss }) => self.losses.push_front(loss.unwrap_or(f64::NAN)),
                None => damaged += u64::from(!line.text.is_empty()),
            }
        }
        if damaged > 0 {
            log::warn!(
                "{}: {damaged} damaged lines are ignored in the mean loss of an epoch",
                metrics.display()
            );
        }
        Ok(self)
    }

    /// Adds the loss of a step.
    pub fn push(&mut self, loss: f64) {
        if self.losses.len() == self.steps {
            self.losses.pop_front();
        }
        self.losses.push_back(loss);
    }

    /// Returns the mean loss of the steps of the last epoch, or of all steps if there are fewer.
    /// Steps whose loss is not finite are ignored; returns `None` if no others are left.
    pub fn mean(&self) -> Option<f64> {
        let finite = || self.losses.iter().filter(|loss| loss.is_finite());
        let count = finite().count();
        (count > 0).then(|| finite().sum::<f64>() / count as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_epoch_ends_with_the_last_step() {
        let mut epoch = EpochLoss::new(3);
        assert_eq!(epoch.mean(), None);
        epoch.push(8.0);
        epoch.push(4.0);
        assert_eq!(epoch.mean(), Some(6.0));
        epoch.push(f64::NAN);
        assert_eq!(epoch.mean(), Some(6.0));
        epoch.push(2.0);
        assert_eq!(epoch.mean(), Some(3.0));
    }

    #[test]
    fn a_restart_knows_the_steps_before() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics.jsonl");
        std::fs::write(
            &path,
            "{\"step\":1,\"loss\":9.0}\n{\"step\":2,\"loss\":null}\n{\"step\":3,\"loss\":1.5}\n",
        )
        .unwrap();
        assert_eq!(EpochLoss::new(2).with_records(&path).unwrap().mean(), Some(1.5));
        assert_eq!(EpochLoss::new(50).with_records(&path).unwrap().mean(), Some(5.25));
        assert_eq!(EpochLoss::new(2).with_records(&dir.path().join("none")).unwrap().mean(), None);
    }

    #[test]
    fn a_file_that_cannot_be_read_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        assert!(
            EpochLoss::new(2)
                .with_records(dir.path())
                .is_err_and(|e| e.to_string().contains("cannot read"))
        );
        let path = dir.path().join("metrics.jsonl");
        std::fs::write(&path, b"{\"step\":1,\"loss\":9.0}\n{\"st\xff\n{\"step\":3,\"loss\":1.0}\n")
            .unwrap();
        assert_eq!(EpochLoss::new(2).with_records(&path).unwrap().mean(), Some(5.0));
    }
}
