//! Learning rates by global batch: `lr_schedule.lr_by_batch`.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Peak learning rates for some global batches.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "BTreeMap<String, f64>", into = "BTreeMap<String, f64>")]
pub struct LrByBatch(BTreeMap<u64, f64>);

impl LrByBatch {
    /// Returns the learning rate for a global batch of `batch` samples, if there is one.
    pub fn get(&self, batch: u64) -> Option<f64> {
        self.0.get(&batch).copied()
    }

    /// Returns the batches that have a learning rate, in ascending order.
    pub fn batches(&self) -> impl Iterator<Item = u64> + '_ {
        self.0.keys().copied()
    }
}

impl FromIterator<(u64, f64)> for LrByBatch {
    fn from_iter<I: IntoIterator<Item = (u64, f64)>>(rates: I) -> Self {
        Self(rates.into_iter().collect())
    }
}

impl TryFrom<BTreeMap<String, f64>> for LrByBatch {
    type Error = String;

    /// Keys of a TOML table are texts, so batches are parsed here.
    fn try_from(rates: BTreeMap<String, f64>) -> Result<Self, String> {
        if rates.is_empty() {
            return Err("lr_by_batch has no batches, expected some such as { 256 = 0.1 }".into());
        }
        let parse = |(batch, rate): (String, f64)| {
            let number = batch.parse().ok().filter(|batch: &u64| *batch > 0);
            let number = number
                .ok_or_else(|| format!("lr_by_batch: {batch:?} is not a number of samples"))?;
            if rate > 0.0 && rate.is_finite() {
                Ok((number, rate))
            } else {
                Err(format!("lr_by_batch: {batch} = {rate}, but rates are greater than 0"))
            }
        };
        rates.into_iter().map(parse).collect()
    }
}

impl From<LrByBatch> for BTreeMap<String, f64> {
    fn from(rates: LrByBatch) -> Self {
        rates.0.into_iter().map(|(batch, rate)| (batch.to_string(), rate)).collect()
    }
}
