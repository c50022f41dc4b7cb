//! Histograms of the tensors of a network, from the ranks that own parts of them.

use std::collections::BTreeMap;

use super::Sharded;
use hpctrain_base::error::{Error, Result};
use hpctrain_base::histogram::Histogram;
use hpctrain_comm::Group;
use hpctrain_device::Kernels;

/// Histograms by the names of tensors.
pub type Histograms = BTreeMap<String, Histogram>;

impl<B: Kernels> Sharded<B> {
    /// The gradients of step `step`, counted from 1, are to be counted once they are reduced. Where
    /// replicas train apart it is those of the first one.
    pub fn count_gradients_of(&mut self, step: u64) {
        if let Some(tables) = &mut self.tables {
            tables.count_gradients_of(step);
        }
        self.counts = Some((step, Histograms::new()));
    }

    /// This rank's part of the histograms that were asked for; empty where it owns nothing, or
    /// where that step was not taken.
    pub fn counted_gradients(&mut self) -> Histograms {
        let mut found =
            self.tables.as_mut().map_or_else(Histograms::new, |tables| tables.counted_gradients());
        found.extend(self.counts.take().into_iter().flat_map(|(_, found)| found));
        found
    }

    /// Between [`Sharded::reduce`] and the update of step `step`: counts the gradients if they were
    /// asked for.
    ///
    /// # Errors
    /// The device failed.
    pub fn count_gradients(&mut self, step: u64) -> Result<()> {
        if let Some(tables) = &mut self.tables {
            tables.count_gradients(step)?;
        }
        let Some((asked, found)) = &self.counts else { return Ok(()) };
        let is_first = self.averaging.is_none() || self.first_replica() == 0;
        // A rank with several replicas comes here once for each.
        if *asked != step || !found.is_empty() || !is_first {
            return Ok(());
        }
        let shards = self.virtual_shards(&self.groups.step.replica);
        let mut found = Histograms::new();
        if !shards.is_empty() {
            let parts = self.parts();
            for reduced in self.gradients()? {
                let layout = reduced.layout;
                let owned = reduced.range;
                let mine =
                    layout.part(shards.start, parts).start..layout.part(shards.end - 1, parts).end;
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

    /// This rank's part of the histograms of all parameters; empty where it owns nothing. Of
    /// replicas that train apart it is the one whose turn it is; after an average all are equal.
    ///
    /// # Errors
    /// A gather under way or the device failed.
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

/// The histograms of whole tensors, from the parts that the ranks of a group have of them.
/// Collective.
///
/// # Errors
/// A message failed.
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
