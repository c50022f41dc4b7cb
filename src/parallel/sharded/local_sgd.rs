//! Local SGD: switching between the replicas that a rank trains, and averaging all replicas.

use super::Sharded;
use crate::Lifetime;
use crate::local_sgd::RoundSummary;
use hpctrain_base::error::{Error, Result};
use hpctrain_base::tree_sum::Tree;
use hpctrain_comm::Pending;
use hpctrain_device::Kernels;

impl<B: Kernels> Sharded<B> {
    /// Returns the number of replicas that this rank trains in turn.
    pub fn replicas_here(&self) -> usize {
        self.averaging.map_or(1, |averaging| averaging.replicas / self.groups.replica.size())
    }

    /// Returns the index of the first replica that this rank trains.
    pub fn first_replica(&self) -> usize {
        self.replicas_here() * self.groups.replica.rank()
    }

    /// Switches to the next replica of this rank, and after the last one to the first.
    pub fn next_replica(&mut self) {
        self.units.iter_mut().for_each(|unit| unit.next_replica());
        self.tied_replicas.iter_mut().for_each(|guest| guest.next_replica());
    }

    /// Averages parameters and optimizer state over all replicas, and takes the outer step if there
    /// is one; afterwards all replicas are equal. There is one all-reduce per unit, on the replica
    /// axis. The first replica must be current, and is afterwards.
    ///
    /// # Errors
    /// Returns an error if the device or a message between ranks fails.
    pub fn average(&mut self) -> Result<()> {
        let mut in_flight = None;
        for index in 0..self.units.len() {
            let sum = self.sum_of_replicas(index)?;
            // The mean of the previous unit is applied while this unit is reduced.
            if let Some((before, mean)) = in_flight.replace((index, sum)) {
                self.apply_average(before, mean)?;
            }
        }
        if let Some((last, mean)) = in_flight {
            self.apply_average(last, mean)?;
        }
        for _ in 0..self.replicas_here() {
            for index in 0..self.units.len() {
                self.send_tied_params(index)?;
                if self.policy.params == Lifetime::Step {
                    self.distribute_params(index);
                }
            }
            self.recv_tied_params()?;
            self.next_replica();
        }
        Ok(())
    }

    /// Starts the sum of the replicas' contributions to the mean of a unit: over the replicas of
    /// this rank, then over all ranks.
    fn sum_of_replicas(&mut self, index: usize) -> Result<Pending<B::Buf>> {
        let replicas = self
            .averaging
            .ok_or_else(|| Error::internal("there is no local SGD to average"))?
            .replicas;
        let backend = &self.backend;
        let here = self.replicas_here();
        let unit = &mut self.units[index];
        let add = |into: &mut B::Buf, from: B::Buf| backend.add(B::all(&from), B::all_mut(into));
        let mut tree = Tree::default();
        for _ in 0..here {
            unit.params.wait()?;
            tree.push(
                unit.owner.scaled_state(backend, 1.0 / replicas as f32, unit.params.get())?,
                add,
            )?;
            unit.next_replica();
        }
        let sum = tree.finish(add)?.ok_or_else(|| Error::internal("the rank has no replica"))?;
        let range = 0..B::len(&sum);
        Ok(self.groups.replica.with_label(&unit.layout.name).all_reduce(sum, range))
    }

    /// Applies the mean of a unit to all replicas of this rank.
    fn apply_average(&mut self, index: usize, mean: Pending<B::Buf>) -> Result<()> {
        let mean = mean.wait()?;
        let here = self.replicas_here();
        let unit = &mut self.units[index];
        for _ in 0..here {
            // Prefetched full parameters are outdated, and freed.
            match self.policy.params {
                Lifetime::Step => unit.owner.apply_average(&mean, unit.params.wait()?)?,
                Lifetime::Use => {
                    unit.params.wait()?;
                    unit.params = super::BufferState::Freed;
                    unit.owner.apply_average(&mean, None)?;
                }
            }
            unit.next_replica();
        }
        Ok(())
    }

    /// Exchanges the messages of all ranks at an average. Collective.
    ///
    /// # Errors
    /// Returns an error if a message fails or is malformed.
    pub fn exchange_summaries(&self, mine: &RoundSummary) -> Result<Vec<RoundSummary>> {
        let messages = self.groups.world.gather_bytes(mine.encode()).wait()?;
        messages.iter().map(|message| RoundSummary::decode(message)).collect()
    }
}
