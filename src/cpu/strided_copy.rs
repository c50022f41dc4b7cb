//! Strided copies of columns.

use rayon::prelude::*;

use super::Cpu;
use super::elementwise::CHUNK;
use super::threads::Threads;
use hpctrain_base::error::Result;
use hpctrain_device::{ColumnsOps, KernelCost, StridedCopy};

pub fn copy_columns(threads: &Threads, s: StridedCopy, x: &[f32], y: &mut [f32]) {
    let ([from, first], [to, at]) = (s.from, s.to);
    assert_eq!((x.len(), y.len()), (s.rows * from, s.rows * to));
    let rows = (CHUNK / to.max(1)).max(1);
    threads.each(x.par_chunks(rows * from).zip(y.par_chunks_mut(rows * to)), |(x, y)| {
        for (x, y) in x.chunks_exact(from).zip(y.chunks_exact_mut(to)) {
            y[at..at + s.count].copy_from_slice(&x[first..first + s.count]);
        }
    });
}

impl ColumnsOps for Cpu {
    fn copy_columns(&self, shape: StridedCopy, x: &[f32], y: &mut [f32]) -> Result<()> {
        let _launch = self.start_kernel(KernelCost::copy_columns(shape));
        copy_columns(&self.threads, shape, x, y);
        Ok(())
    }
}
