//! Energy of a run: one rank per machine reads the machine's counters, and rank 0 records the sum.

use hpctrain_base::energy::{Counters, EnergySource, Meter, machine};
use hpctrain_base::error::{Error, Result};
use hpctrain_comm::Group;
use hpctrain_config::telemetry::metrics::Step;
use hpctrain_config::telemetry::run_record::EnergyUse;
use hpctrain_device::Backend;

/// Joules in a kWh.
const KWH: f64 = 3.6e6;

/// The energy counters of all machines of a run, as one rank sees them.
pub struct Energy<B: Backend> {
    world: Group<B>,
    /// Set on the ranks that read counters. `None` on all ranks if nothing can be counted.
    meter: Option<Meter>,
    /// The sources that all machines have.
    sources: Vec<EnergySource>,
    machines: usize,
}

impl<B: Backend> Energy<B> {
    /// Opens the counters of every machine on its first rank, and starts the sources that all
    /// machines have. `gpu` is the CUDA id of this rank's GPU. Collective.
    ///
    /// # Errors
    /// Returns an error if a message between ranks failed.
    pub fn open(world: &Group<B>, host: &str, gpu: Option<&str>) -> Result<Self> {
        let mine = serde_json::to_vec(&(machine(host), gpu))
            .map_err(|e| Error::internal(e.to_string()))?;
        let messages = world.gather_bytes(mine).wait()?;
        let places = messages.iter().map(|message| serde_json::from_slice(message));
        let places: Vec<(String, Option<String>)> = places
            .collect::<Result<_, _>>()
            .map_err(|e| Error::comm(format!("a rank's machine and GPU: {e}")))?;
        let is_reader =
            |rank: usize| places.iter().position(|place| place.0 == places[rank].0) == Some(rank);
        let mut gpus: Vec<String> = places
            .iter()
            .filter(|place| place.0 == places[world.rank()].0)
            .filter_map(|place| place.1.clone())
            .collect();
        gpus.sort();
        gpus.dedup();
        let counters = is_reader(world.rank()).then(|| Counters::open(&gpus));

        let has = |source: EnergySource| {
            counters.as_ref().is_none_or(|counters| counters.has(source).is_ok())
        };
        let all = world.all_gather_u64(&[
            u64::from(has(EnergySource::Gpu)),
            u64::from(has(EnergySource::Cpu)),
        ])?;
        let sources: Vec<EnergySource> = [EnergySource::Gpu, EnergySource::Cpu]
            .into_iter()
            .enumerate()
            .filter(|(at, _)| all.iter().all(|rank| rank.get(*at) == Some(&1)))
            .map(|(_, one)| one)
            .collect();
        let meter =
            counters.filter(|_| !sources.is_empty()).map(|counters| counters.start(&sources));
        let machines = (0..places.len()).filter(|rank| is_reader(*rank)).count();
        Ok(Self { world: world.clone(), meter, sources, machines })
    }

    /// Returns the joules of all machines since the counters were opened, or `None` if they cannot
    /// be counted. The value is meaningful on rank 0 only. Collective if there are several
    /// machines.
    ///
    /// # Errors
    /// Returns an error if a message between ranks failed.
    pub fn joules(&self) -> Result<Option<f64>> {
        if self.sources.is_empty() {
            return Ok(None);
        }
        let mine = self.meter.as_ref().map_or(Some(0.0), Meter::joules).unwrap_or(f64::NAN);
        let all = match self.machines {
            1 => mine,
            _ => self
                .world
                .all_gather_u64(&[mine.to_bits()])?
                .iter()
                .flatten()
                .map(|bits| f64::from_bits(*bits))
                .sum(),
        };
        Ok(Some(all).filter(|joules| joules.is_finite()))
    }

    /// Returns the sources that are counted.
    pub fn sources(&self) -> &[EnergySource] {
        &self.sources
    }
}

/// Energy use of a run, as recorded by rank 0.
pub struct EnergyAccount {
    /// kWh of earlier starts.
    earlier_kwh: f64,
    /// Steps and joules at the last record.
    recorded: (u64, f64),
    /// The step at which this start began.
    began: u64,
    /// Predictions per step.
    per_step: f64,
}

impl EnergyAccount {
    /// Creates the account of a run that used `earlier_kwh` before this start. The start begins at
    /// `step` and makes `per_step` predictions per step.
    pub fn new(earlier_kwh: f64, step: u64, per_step: u64) -> Self {
        Self { earlier_kwh, recorded: (step, 0.0), began: step, per_step: per_step as f64 }
    }

    /// Adds the energy to the record of a step. `joules` is the energy of this start at its end.
    pub fn add_to(&mut self, record: &mut Step, joules: f64) {
        let (step, before) = self.recorded;
        record.energy_kwh = Some(self.kwh(joules));
        record.joules_per_token = Some((joules - before) / self.predictions(step, record.step));
        self.recorded = (record.step, joules);
    }

    /// Returns the energy of the run after `step` steps, for the run summary.
    pub fn total(&self, joules: f64, step: u64, sources: &[EnergySource]) -> EnergyUse {
        let joules_per_token = joules / self.predictions(self.began, step);
        EnergyUse { sources: sources.to_vec(), kwh: self.kwh(joules), joules_per_token }
    }

    fn kwh(&self, joules: f64) -> f64 {
        self.earlier_kwh + joules / KWH
    }

    /// Returns the number of predictions in the steps `from + 1 ..= to`.
    fn predictions(&self, from: u64, to: u64) -> f64 {
        to.saturating_sub(from).max(1) as f64 * self.per_step
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn energy_is_summed_across_starts() {
        let mut account = EnergyAccount::new(0.5, 10, 100);
        let mut record = Step { step: 20, ..Step::default() };
        account.add_to(&mut record, 3.6e6);
        assert_eq!((record.energy_kwh, record.joules_per_token), (Some(1.5), Some(3600.0)));
        record.step = 22;
        account.add_to(&mut record, 3.6e6 + 400.0);
        assert_eq!(record.joules_per_token, Some(2.0));
        let total = account.total(7.2e6, 30, &[EnergySource::Gpu]);
        assert_eq!((total.kwh, total.joules_per_token), (2.5, 3600.0));
    }
}
