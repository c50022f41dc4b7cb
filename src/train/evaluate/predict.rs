//! Predictions: the outputs of a network for every sample of a data set, in row order.

use ndarray::Array2;

use super::predictions::Predictions;
use hpctrain_base::error::{Error, Result};
use hpctrain_data::{Batch, Source};
use hpctrain_device::Kernels;
use hpctrain_engine::{Model, micro_batches};

/// Computes the outputs of all samples of `dataset`, `chunk` at a time, and writes them to a file.
/// Collective over the ranks of the model: chunks are distributed round-robin over the
/// data-parallel ranks, and the rank of the last stage that has `to` writes all rows in order.
///
/// # Errors
/// Returns an error if the data, the device, the output file, or a message between ranks fails.
pub fn predict<B: Kernels>(
    model: &mut Model<B>,
    dataset: impl Source,
    chunk: u64,
    mut to: Option<Predictions>,
) -> Result<()> {
    let write = |first: usize, rows: &[f32]| to.as_mut().map_or(Ok(()), |to| to.write(first, rows));
    predict_chunks(model, dataset, chunk, write)?;
    model.sharded.data().all_ok(to.map_or(Ok(()), Predictions::finish))
}

/// Returns the outputs of all samples of `dataset`, a row for each, computed `chunk` samples at a
/// time; `None` except on the ranks of the last pipeline stage. For classes the outputs are logits.
/// Collective over the ranks of the model. The array is one of `ndarray` 0.17.
///
/// ```no_run
/// use hpctrain_base::error::Result;
/// use hpctrain_data::Arrays;
/// use hpctrain_data::ndarray::Array2;
/// use hpctrain_device::Kernels;
/// use hpctrain_engine::Model;
/// use hpctrain_train::evaluate::predict_array;
///
/// /// Prints the likeliest class of each row.
/// fn print_classes<B: Kernels>(model: &mut Model<B>, rows: Array2<f32>) -> Result<()> {
///     if let Some(logits) = predict_array(model, Arrays::from_features(rows)?, 1000)? {
///         for row in logits.rows() {
///             let likeliest = row.iter().enumerate().max_by(|(_, a), (_, b)| a.total_cmp(b));
///             println!("{likeliest:?}");
///         }
///     }
///     Ok(())
/// }
/// ```
///
/// # Errors
/// Returns an error if the data, the device, or a message between ranks fails.
pub fn predict_array<B: Kernels>(
    model: &mut Model<B>,
    dataset: impl Source,
    chunk: u64,
) -> Result<Option<Array2<f32>>> {
    let samples = dataset.samples() as usize;
    let is_last = model.sharded.stage().is_last();
    let mut outputs: Vec<f32> = Vec::new();
    // Chunks come in order.
    predict_chunks(model, dataset, chunk, |_, rows| {
        outputs.extend_from_slice(rows);
        Ok(())
    })?;
    if !is_last {
        return Ok(None);
    }
    let width = outputs.len() / samples.max(1);
    Array2::from_shape_vec((samples, width), outputs)
        .map(Some)
        .map_err(|e| Error::internal(format!("outputs of {samples} rows: {e}")))
}

/// Computes the outputs of all samples, and gives them to `write` in order, with the number of the
/// first sample, on every rank of the last pipeline stage.
fn predict_chunks<B: Kernels>(
    model: &mut Model<B>,
    mut dataset: impl Source,
    chunk: u64,
    mut write: impl FnMut(usize, &[f32]) -> Result<()>,
) -> Result<()> {
    let data = model.sharded.data().clone();
    let samples = dataset.samples();
    let ranks = data.size() as u64;
    let chunks = samples.div_ceil(chunk);
    for round in 0..chunks.div_ceil(ranks) {
        // Every rank computes in every round, because all-gathers of parameters are collective;
        // results beyond the last chunk are dropped.
        let mine = round * ranks + data.rank() as u64;
        let at = mine.min(chunks - 1) * chunk;
        let batch = Batch::read(&mut dataset, at..samples.min(at + chunk), at..);
        let micro = micro_batches::upload(
            &model.backend,
            &data.all_ok(batch)?,
            1,
            0,
            model.sharded.stage(),
        )?;
        let Some(output) = model.output(&micro)? else { continue };
        let values = model.download(&output, micro.rows())?;
        let message = if mine < chunks { bytemuck::cast_slice(&values).to_vec() } else { vec![] };
        let all = data.gather_bytes(message).wait()?;
        let of_chunks = all.iter().zip(round * ranks..).filter(|(bytes, _)| !bytes.is_empty());
        let written = of_chunks.map(|(bytes, number)| {
            let numbers: Vec<f32> =
                bytes.as_chunks().0.iter().map(|bytes| f32::from_ne_bytes(*bytes)).collect();
            write((number * chunk) as usize, &numbers)
        });
        let written = written.collect::<Result<()>>();
        data.all_ok(written)?;
    }
    Ok(())
}
