//! Checksums, computed in separate passes.

use super::launch::Arg;
use super::memory::{Element, View};
use super::{Cuda, Scalar};
use hpctrain_base::error::Result;
use hpctrain_device::{Audit, DigestOps, KernelCost};

impl DigestOps for Cuda {
    fn digest(&self, x: View<'_>) -> Result<Scalar> {
        let _launch = self.launched(KernelCost::digest(x.len));
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
    pub(super) fn audited<const N: usize>(
        &self,
        audit: Option<&mut Audit<Scalar>>,
        buffers: [View<'_>; N],
        update: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let Some(audit) = audit else { return update() };
        for buffer in buffers {
            audit.found.push(self.digest(buffer)?);
        }
        update()?;
        for buffer in buffers {
            audit.left.push(self.digest(buffer)?);
        }
        Ok(())
    }
}
