//! Checksums, computed in separate passes.

use super::launch::Arg;
use super::memory::{Element, View};
use super::{Cuda, Scalar};
use hpctrain_base::error::Result;
use hpctrain_device::{DigestOps, KernelCost, UpdateChecksums};

impl DigestOps for Cuda {
    fn digest(&self, x: View<'_>) -> Result<Scalar> {
        let _launch = self.profile_launch(KernelCost::digest(x.len));
        assert!(x.element == Element::F32, "a digest");
        self.sum_chunks(x.len, |grid, partial| {
            self.launch(
                "checksum.cu",
                "digest_partial",
                grid,
                &[x.into(), partial, Arg::long(x.len)],
            )
        })
    }
}

impl Cuda {
    /// Runs an update. For a silent-data-corruption (SDC) check, also computes checksums of the
    /// buffers before and after it.
    pub(super) fn with_checksums<const N: usize>(
        &self,
        audit: Option<&mut UpdateChecksums<Scalar>>,
        buffers: [View<'_>; N],
        update: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let Some(audit) = audit else { return update() };
        for buffer in buffers {
            audit.before.push(self.digest(buffer)?);
        }
        update()?;
        for buffer in buffers {
            audit.after.push(self.digest(buffer)?);
        }
        Ok(())
    }
}
