//! A digest of parameters and optimizer state in memory, by which each update checks that they have
//! not changed since the previous one.

use hpctrain_base::error::{Error, Result};
use hpctrain_device::{Kernels, UpdateChecksums};

/// The checksum of a range's memory.
pub struct SdcChecksum<B: Kernels> {
    /// The digest after the last update, once it is read; none before the first update, and after
    /// other changes.
    left: Option<u64>,
    /// The digests of the last update, which the device may still compute.
    pending: Option<UpdateChecksums<B::Scalar>>,
}

impl<B: Kernels> Default for SdcChecksum<B> {
    fn default() -> Self {
        Self { left: None, pending: None }
    }
}

/// Returns the error of changed memory.
fn changed() -> Error {
    Error::corrupted("parameters or optimizer state have changed in memory since the last update")
}

/// Returns the sum of digests, each of which f64 holds exactly.
fn read<B: Kernels>(backend: &B, digests: Vec<B::Scalar>) -> Result<u64> {
    digests.into_iter().map(|digest| Ok(backend.read(digest)? as u64)).sum()
}

impl<B: Kernels> SdcChecksum<B> {
    /// Records the digests that an update computes.
    pub fn updated(&mut self, audit: UpdateChecksums<B::Scalar>) {
        self.pending = Some(audit);
    }

    /// Returns the digest after the last update, if nothing else has changed the memory.
    ///
    /// # Errors
    /// Returns an error if memory changed between the last two updates, or the device fails.
    pub fn settle(&mut self, backend: &B) -> Result<Option<u64>> {
        if let Some(UpdateChecksums { before: found, after: left }) = self.pending.take() {
            let found = read(backend, found)?;
            let left = read(backend, left)?;
            if self.left.replace(left).is_some_and(|before| before != found) {
                return Err(changed());
            }
        }
        Ok(self.left)
    }

    /// Compares the memory with the digest after the last update.
    ///
    /// # Errors
    /// Returns an error if they differ, or the device fails.
    pub fn compare<'a>(
        &mut self,
        backend: &B,
        buffers: impl Iterator<Item = B::View<'a>>,
    ) -> Result<()> {
        let Some(left) = self.settle(backend)? else { return Ok(()) };
        let digests = buffers.map(|buffer| backend.digest(buffer)).collect::<Result<_>>()?;
        if read(backend, digests)? == left { Ok(()) } else { Err(changed()) }
    }

    /// Forgets the digests, after something other than an update has changed the memory.
    pub fn forget(&mut self) {
        *self = Self::default();
    }
}
