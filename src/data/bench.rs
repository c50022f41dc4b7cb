//! Throughput of the loader, compared with plain positional reads of the same bytes.

use std::fs::File;
use std::hint::black_box;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Instant;

use hdf5::types::VarLenUnicode;

use super::format::{Format, TokenShard, write_rows};
use super::h5::one_line;
use super::{
    DataSpec, Dataset, Ids, Loader, SampleSpec, Sampler, Split, Target, Tokenizer, Verify,
};
use crate::hdf5_open;
use hpctrain_base::error::{Error, Result};
use hpctrain_base::random::Stream;

/// Bytes of an image of 28 × 28, and of its class.
const IMAGE: usize = 784;
const CLASS: usize = size_of::<u32>();
/// Images per compressed chunk.
const CHUNK: usize = 64;
/// Ids per window, without the one that follows.
const CONTEXT: usize = 256;
/// Samples per batch, and batches read ahead.
const BATCH: u64 = 128;
const DEPTH: usize = 4;

/// The times of reading one layout of data in one way.
#[derive(Debug, Clone)]
pub struct ReadTiming {
    /// The case that was measured.
    pub what: &'static str,
    /// The number of samples per pass.
    pub samples: u64,
    /// The uncompressed size of a sample in bytes.
    pub bytes: usize,
    /// Seconds of each round's pass through the loader.
    pub seconds: Vec<f64>,
    /// Seconds of plain reads of the same rows in the same order, one for each row of each dataset;
    /// empty if the file does not store rows contiguously.
    pub plain: Vec<f64>,
}

/// One case: the file, and the settings of its reads.
struct Case {
    what: &'static str,
    path: PathBuf,
    samples: SampleSpec,
    context: usize,
    shuffled: bool,
    verify: Verify,
    /// For each dataset with contiguous rows, its name, the bytes of a row and the distance between
    /// rows in bytes.
    rows: Vec<(&'static str, usize, u64)>,
}

/// Writes `samples` random images and as many windows of tokens below `folder`, and reads them
/// `rounds` times in several ways, opening the files anew in each round. The files are in the page
/// cache.
///
/// # Errors
/// Returns an error if a file cannot be written or read.
pub fn time(folder: &Path, samples: usize, rounds: usize) -> Result<Vec<ReadTiming>> {
    let [images, packed, tokens] =
        ["images.h5", "packed.h5", "tokens.h5"].map(|name| folder.join(name));
    let written = |path: &Path, written: hdf5::Result<()>| {
        written.map_err(|e| Error::io("write", path, one_line(&e)))
    };
    written(&images, write_images(&images, samples, false))?;
    written(&packed, write_images(&packed, samples, true))?;
    write_tokens(&tokens, samples)?;
    let image_rows = vec![("inputs", IMAGE, IMAGE as u64), ("targets", CLASS, CLASS as u64)];
    use Verify::{Always, FirstPass, Off};
    let cases = [
        Case::images("images, shuffled", &images, true, Off, image_rows.clone()),
        Case::images("images, in order", &images, false, Off, image_rows.clone()),
        Case::images("images, deflated chunks, shuffled", &packed, true, Off, vec![]),
        Case::text("token windows, shuffled", &tokens, Off),
        Case::images("images, verify = first-pass", &images, true, FirstPass, image_rows.clone()),
        Case::images("images, verify = always", &images, true, Always, image_rows),
        Case::text("token windows, verify = first-pass", &tokens, FirstPass),
        Case::text("token windows, verify = always", &tokens, Always),
    ];
    cases.iter().map(|case| case.time(rounds)).collect()
}

impl Case {
    /// Returns a case of images.
    fn images(
        what: &'static str,
        path: &Path,
        shuffled: bool,
        verify: Verify,
        rows: Vec<(&'static str, usize, u64)>,
    ) -> Self {
        let samples = SampleSpec::Rows { input: IMAGE, ids: Ids::None, target: Target::Class(10) };
        Self { what, path: path.to_owned(), samples, context: 1, shuffled, verify, rows }
    }

    /// Returns a case of windows of tokens, shuffled.
    fn text(what: &'static str, path: &Path, verify: Verify) -> Self {
        Self {
            what,
            path: path.to_owned(),
            samples: SampleSpec::Text,
            context: CONTEXT,
            shuffled: true,
            verify,
            rows: vec![("tokens", (CONTEXT + 1) * 2, CONTEXT as u64 * 2)],
        }
    }

    /// Returns the data set, opened anew.
    fn open(&self) -> Result<Dataset> {
        let spec = DataSpec {
            samples: self.samples.clone(),
            verify: self.verify,
            ..DataSpec::new(&self.path)
        };
        Dataset::open(&spec, Split::Train, self.context)
    }

    fn time(&self, rounds: usize) -> Result<ReadTiming> {
        let samples = self.open()?.samples();
        let sampler =
            if self.shuffled { Sampler::new(samples, 1) } else { Sampler::in_order(samples) };
        let bytes =
            if self.samples == SampleSpec::Text { (CONTEXT + 1) * 2 } else { IMAGE + CLASS };
        let mut seconds = Vec::new();
        let mut plain = Vec::new();
        // The first round fills the page cache.
        for round in 0..=rounds {
            let dataset = self.open()?;
            let start = Instant::now();
            let batches = (0..samples / BATCH).map(|batch| batch * BATCH..(batch + 1) * BATCH);
            let mut loader = Loader::start(dataset, sampler, batches, DEPTH)?;
            for _ in 0..samples / BATCH {
                let batch = black_box(loader.next()?);
                loader.recycle(batch);
            }
            let of_loader = start.elapsed().as_secs_f64();
            let of_plain = self.read_plainly(&sampler, samples / BATCH * BATCH)?;
            if round > 0 {
                seconds.push(of_loader);
                plain.extend(of_plain);
            }
        }
        Ok(ReadTiming { what: self.what, samples: samples / BATCH * BATCH, bytes, seconds, plain })
    }

    /// Returns the seconds that plain reads of the same rows take; `None` if rows are not
    /// contiguous.
    fn read_plainly(&self, sampler: &Sampler, samples: u64) -> Result<Option<f64>> {
        if self.rows.is_empty() {
            return Ok(None);
        }
        let failed = |e: String| Error::io("read", &self.path, e);
        let structured = hdf5_open::open(&self.path).map_err(|e| failed(one_line(&e)))?;
        let offsets = self.rows.iter().map(|(name, ..)| {
            let offset = structured.dataset(name).map_err(|e| failed(one_line(&e)))?.offset();
            offset.ok_or_else(|| {
                Error::internal(format!("{name} was written contiguously and has no offset"))
            })
        });
        let offsets: Vec<u64> = offsets.collect::<Result<_>>()?;
        let file = File::open(&self.path).map_err(|e| failed(e.to_string()))?;
        let mut buffer = vec![0; IMAGE.max((CONTEXT + 1) * 2)];
        let start = Instant::now();
        for position in 0..samples {
            let sample = sampler.index(position);
            for ((_, bytes, stride), offset) in self.rows.iter().zip(&offsets) {
                let into = &mut buffer[..*bytes];
                file.read_exact_at(into, offset + sample * stride)
                    .map_err(|e| failed(e.to_string()))?;
                black_box(into);
            }
        }
        Ok(Some(start.elapsed().as_secs_f64()))
    }
}

/// Writes images of random bytes with their checksums, or mostly zeros in compressed chunks if
/// `packed`.
fn write_images(path: &Path, samples: usize, packed: bool) -> hdf5::Result<()> {
    let file = hdf5_open::create(path)?;
    let mut pixels = random(samples * IMAGE);
    let shape = [samples, 28, 28, 1];
    let classes: Vec<u32> = random(samples).into_iter().map(|byte| u32::from(byte % 10)).collect();
    let inputs = if packed {
        // About a fifth, as in images of digits.
        pixels.iter_mut().for_each(|pixel| *pixel = if *pixel < 51 { 200 } else { 0 });
        let builder =
            file.new_dataset::<u8>().shape(shape).chunk([CHUNK.min(samples), 28, 28, 1]).deflate(4);
        let inputs = builder.create("inputs")?;
        inputs.write_raw(&pixels)?;
        file.new_dataset::<u32>().shape(samples).create("targets")?.write_raw(&classes)?;
        inputs
    } else {
        let format: VarLenUnicode =
            Format::Rows.name().parse().map_err(|_| "the format has no name")?;
        file.new_attr::<VarLenUnicode>().create("format")?.write_scalar(&format)?;
        file.new_attr::<u32>().create("format_version")?.write_scalar(&Format::Rows.version())?;
        write_rows(&file, "/targets", &[samples], &classes)?;
        write_rows(&file, "/inputs", &shape, &pixels)?
    };
    for (name, number) in
        [(super::normalization::MEAN, 127.5f32), (super::normalization::STD, 73.9)]
    {
        inputs.new_attr::<f32>().shape(1).create(name)?.write_raw(&[number])?;
    }
    file.close()
}

/// Writes ids of 16 bits, with checksums.
fn write_tokens(path: &Path, samples: usize) -> Result<()> {
    let count = samples * CONTEXT + 1;
    let tokenizer = Tokenizer::Gpt2;
    let below = tokenizer.vocabulary() as u32;
    let pairs = random(count * 2);
    let ids: Vec<u32> = pairs
        .as_chunks::<2>()
        .0
        .iter()
        .map(|pair| u32::from(u16::from_le_bytes(*pair)) % below)
        .collect();
    let source = "random";
    let source_sha256 = "";
    let split = Split::Train;
    let (tokenizer, vocabulary, ids) = (Some(&tokenizer), tokenizer.vocabulary(), &ids[..]);
    TokenShard {
        ids,
        tokenizer,
        vocabulary,
        source,
        source_sha256,
        split,
        shard: 0,
        num_shards: 1,
        compress: None,
    }
    .write(path)
}

fn random(count: usize) -> Vec<u8> {
    let stream = Stream::new(1);
    (0..count.div_ceil(16) as u64)
        .flat_map(|block| stream.block(block))
        .flat_map(u32::to_le_bytes)
        .take(count)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_way_is_timed() {
        let folder = tempfile::tempdir().unwrap();
        let timings = time(folder.path(), 300, 2).unwrap();
        let rounds: Vec<_> =
            timings.iter().map(|one| (one.samples, one.seconds.len(), one.plain.len())).collect();
        let plain = (256, 2, 2);
        let packed = (256, 2, 0);
        assert_eq!(rounds, [plain, plain, packed, plain, plain, plain, plain, plain]);
        assert!(
            timings
                .iter()
                .flat_map(|one| one.seconds.iter().chain(&one.plain))
                .all(|seconds| *seconds > 0.0)
        );
    }
}
