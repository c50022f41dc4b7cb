//! Histograms of the tensors of a network, of which each rank counts the parts it owns.

use super::Sharded;
use super::host_units::HostUnits;
use crate::owned::Histograms;
use hpctrain_base::error::{Error, Result};
use hpctrain_comm::Group;
use hpctrain_device::Kernels;

impl<B: Kernels> Sharded<B> {
    /// Requests histograms of the reduced gradients of step `step`, counted from 1; with local SGD,
    /// of the first replica.
    pub fn count_gradients_of(&mut self, step: u64) {
        if let Some(tables) = &mut self.host_units {
            tables.count_gradients_of(step);
        }
        self.counts = Some((step, Histograms::new()));
    }

    /// Returns this rank's part of the requested histograms, which is empty if it owns nothing or
    /// the step was not run.
    pub fn counted_gradients(&mut self) -> Histograms {
        let mut found =
            self.host_units.as_mut().map_or_else(Histograms::new, HostUnits::counted_gradients);
        found.extend(self.counts.take().into_iter().flat_map(|(_, found)| found));
        found
    }

    /// Counts the gradients of step `step` if they were requested. Must be called between
    /// [`Sharded::reduce`] and the update.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    pub fn count_gradients(&mut self, step: u64) -> Result<()> {
        if let Some(tables) = &mut self.host_units {
            tables.count_gradients(step)?;
        }
        let Some((requested, found)) = &self.counts else { return Ok(()) };
        let is_first = self.averaging.is_none() || self.first_replica() == 0;
        // A rank with several replicas calls this once for each.
        if *requested != step || !found.is_empty() || !is_first {
            return Ok(());
        }
        let shards = self.virtual_shards(&self.groups.step.replica);
        let mut found = Histograms::new();
        if !shards.is_empty() {
            let parts = self.parts();
            for reduced in self.gradients()? {
                let layout = reduced.layout;
                let owned = reduced.range;
                let mine = layout.parts(shards.clone(), parts);
                let until = mine.end - owned.start;
                let from = mine.start - owned.start;
                let mut host = vec![0.0; mine.len()];
                self.backend
                    .download(B::split_at(B::split_at(reduced.grad, until).0, from).1, &mut host)?;
                for piece in layout.pieces(mine).filter(|piece| piece.tensor.average.is_none()) {
                    found.entry(piece.tensor.name.clone()).or_default().add(&host[piece.of_owned]);
                }
            }
        }
        self.counts = Some((step, found));
        Ok(())
    }

    /// Returns this rank's part of the histograms of all parameters, which is empty if it owns
    /// nothing. With local SGD they are those of the current replica; after an average all are
    /// equal.
    ///
    /// # Errors
    /// Returns an error if an all-gather in flight or the device fails.
    pub fn counted_parameters(&mut self) -> Result<Histograms> {
        let mut found = Histograms::new();
        for owned in self.owned()? {
            let mut host = vec![0.0; owned.range.len()];
            owned.params.read(&mut host)?;
            for piece in owned.layout.pieces(owned.range.clone()) {
                found.entry(piece.tensor.name.clone()).or_default().add(&host[piece.of_owned]);
            }
        }
        Ok(found)
    }
}

/// Returns the histograms of whole tensors, from the parts of all ranks of a group. Collective.
///
/// # Errors
/// Returns an error if a message fails or is malformed.
pub fn whole<B: Kernels>(group: &Group<B>, mine: &Histograms) -> Result<Histograms> {
    let mine = serde_json::to_vec(mine).map_err(|e| Error::internal(format!("histograms: {e}")))?;
    let mut all = Histograms::new();
    for part in group.gather_bytes(mine).wait()? {
        let part: Histograms = serde_json::from_slice(&part)
            .map_err(|e| Error::comm(format!("another rank sent malformed histograms: {e}")))?;
        for (name, part) in part {
            all.entry(name).or_default().merge(&part);
        }
    }
    Ok(all)
}
