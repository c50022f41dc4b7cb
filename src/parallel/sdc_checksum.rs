//! A digest of parameters and optimizer state in memory: each update tells whether it has found
//! them as the one before has left them.

use hpctrain_base::error::{Error, Result};
use hpctrain_device::{Audit, Kernels};

/// The audit of a range's memory.
pub struct SdcChecksum<B: Kernels> {
    /// The digest that an update has left, once it is read; none before the first, and after other
    /// changes.
    left: Option<u64>,
    /// The digests of the last update, while the device may still compute them.
    under_way: Option<Audit<B::Scalar>>,
}

impl<B: Kernels> Default for SdcChecksum<B> {
    fn default() -> Self {
        Self { left: None, under_way: None }
    }
}

/// An audit has found other bits than it should.
fn changed() -> Error {
    Error::corrupted("parameters or optimizer state have changed in memory since the last update")
}

/// Reads digests: their sum, which f64 holds exactly.
fn read<B: Kernels>(backend: &B, digests: Vec<B::Scalar>) -> Result<u64> {
    digests.into_iter().map(|digest| Ok(backend.read(digest)? as u64)).sum()
}

impl<B: Kernels> SdcChecksum<B> {
    /// An update was made under an audit.
    pub fn updated(&mut self, audit: Audit<B::Scalar>) {
        self.under_way = Some(audit);
    }

    /// The digest that the last update has left, if nothing else has changed the memory.
    ///
    /// # Errors
    /// The update had found other values than the one before it had left; or the device failed.
    pub fn settle(&mut self, backend: &B) -> Result<Option<u64>> {
        if let Some(Audit { found, left }) = self.under_way.take() {
            let found = read(backend, found)?;
            let left = read(backend, left)?;
            if self.left.replace(left).is_some_and(|before| before != found) {
                return Err(changed());
            }
        }
        Ok(self.left)
    }

    /// Compares the memory with the digest that the last update has left.
    ///
    /// # Errors
    /// They differ; or the device failed.
    pub fn compare<'a>(
        &mut self,
        backend: &B,
        buffers: impl Iterator<Item = B::View<'a>>,
    ) -> Result<()> {
        let Some(left) = self.settle(backend)? else { return Ok(()) };
        let digests = buffers.map(|buffer| backend.digest(buffer)).collect::<Result<_>>()?;
        if read(backend, digests)? == left { Ok(()) } else { Err(changed()) }
    }

    /// The memory was changed by something else than an update.
    pub fn forget(&mut self) {
        *self = Self::default();
    }
}
