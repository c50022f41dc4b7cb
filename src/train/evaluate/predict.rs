//! Predictions: the outputs of a network for every sample of a data set, in row order.

use super::predictions::Predictions;
use hpctrain_base::error::Result;
use hpctrain_data::{Batch, Source};
use hpctrain_device::Kernels;
use hpctrain_engine::{Model, micro_batches};

/// Computes the outputs of all samples of `dataset`, `chunk` at a time. Collective over the ranks
/// of the model: chunks are distributed round-robin over the data-parallel ranks, and the rank of
/// the last stage that has `to` writes all rows in order.
///
/// # Errors
/// Returns an error if the data, the device, the output file, or a message between ranks fails.
pub fn predict<B: Kernels>(
    model: &mut Model<B>,
    mut dataset: impl Source,
    chunk: u64,
    mut to: Option<Predictions>,
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
        let written = to.as_mut().map_or(Ok(()), |to| {
            for (bytes, chunk_number) in
                all.iter().zip(round * ranks..).filter(|(bytes, _)| !bytes.is_empty())
            {
                let numbers: Vec<f32> =
                    bytes.as_chunks().0.iter().map(|bytes| f32::from_ne_bytes(*bytes)).collect();
                to.write((chunk_number * chunk) as usize, &numbers)?;
            }
            Ok(())
        });
        data.all_ok(written)?;
    }
    data.all_ok(to.map_or(Ok(()), Predictions::finish))
}
