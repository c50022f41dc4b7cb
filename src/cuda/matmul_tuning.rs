//! Matmul autotuning: measures the algorithms that cuBLASLt proposes for a matmul, on operands of
//! its shape.
//!
//! Operands are scratch memory; no training state is read or written. Operands are read repeatedly,
//! so more of them are in the caches than within a step, which is the same for all algorithms.

use cudarc::driver::CudaEvent;
use cudarc::driver::sys::CUevent_flags;

use super::event::milliseconds;
use super::libraries::check;
use super::matmul_desc::{BEST_ALIGNMENT, Epilogue, MatmulDesc, Matrix};
use super::memory::Element;
use super::{Cuda, CudaBuf};
use hpctrain_base::error::{Error, Kind, Result};
use hpctrain_base::random::Stream;
use hpctrain_device::matmul_algo::fastest;
use hpctrain_device::{
    Backend, ChosenAlgorithm, Gemm, MatmulAlgorithm, MatmulAlgorithms, MatmulKey, MemoryKind,
};

/// The number of algorithms to measure, including the heuristic's first.
const PROPOSALS: usize = 8;

/// The number of measurements of each algorithm, of which the median is taken.
const ROUNDS: usize = 5;

/// The least milliseconds of a measurement, if [`MOST_TIMES`] allows: event timers have a
/// resolution of half a microsecond.
const LEAST: f32 = 0.1;

/// The most matmuls in one measurement.
const MOST_TIMES: usize = 10;

/// The number of random values with which operands are filled, repeatedly. Zeros would draw less
/// power than real values.
const NUMBERS: usize = 1 << 16;

/// A matmul with scratch operands.
struct Scratch {
    product: MatmulDesc,
    _operands: Vec<CudaBuf>,
}

/// An algorithm under measurement.
struct Candidate {
    algorithm: MatmulAlgorithm,
    /// Its rank among the proposals.
    place: usize,
    /// Matmuls in one measurement.
    times: usize,
    /// Milliseconds per matmul.
    took: Vec<f32>,
}

impl Candidate {
    /// Returns the median time.
    fn seconds(&mut self) -> f64 {
        self.took.sort_by(f32::total_cmp);
        f64::from(self.took[self.took.len() / 2]) / 1e3
    }
}

impl Cuda {
    /// Allocates `len` random values at an address that is a multiple of exactly `alignment` bytes,
    /// up to 256. Returns the buffer and the address.
    fn operand(&self, len: usize, element: Element, alignment: usize) -> Result<(CudaBuf, u64)> {
        let lead = if alignment < BEST_ALIGNMENT { alignment / element.size() } else { 0 };
        let mut buf = self.take(MemoryKind::Activations, lead + len, element)?;
        let mut numbers = vec![0.0; NUMBERS.min(lead + len)];
        Stream::new(0).fill_normal(&mut numbers);
        self.write(&numbers, buf.view_mut(0..numbers.len()))?;
        let mut filled = numbers.len();
        while filled < buf.len() {
            let more = filled.min(buf.len() - filled);
            let (from, to) = buf.view_mut(0..filled + more).split_at(filled);
            self.copy_within(from.shared().split_at(more).0, &to)?;
            filled += more;
        }
        let at = buf.view(lead..buf.len()).pointer;
        Ok((buf, at))
    }

    /// Allocates operands with a matmul's shapes and alignments.
    fn scratch(&self, kind: &MatmulKey) -> Result<Scratch> {
        let MatmulKey {
            sizes: [m, n, k],
            strides,
            transposed: [ta, tb],
            adds,
            keeps,
            bytes,
            alignments,
            ..
        } = *kind;
        let rows = [if ta { k } else { m }, if tb { n } else { k }, m];
        let elements = bytes.map(Element::with_size);
        let mut operands = Vec::new();
        let mut operand = |len: usize, element: Element, alignment: usize| {
            let (buf, at) = self.operand(len, element, alignment)?;
            operands.push(buf);
            Ok::<_, Error>(at)
        };
        let mut matrix = |index: usize| {
            let pointer =
                operand(rows[index] * strides[index], elements[index], alignments[index] as usize)?;
            Ok::<_, Error>(Matrix { pointer, element: elements[index] })
        };
        let a = matrix(0)?;
        let b = matrix(1)?;
        let c = matrix(2)?;
        let bias = operand(n, c.element, BEST_ALIGNMENT)?;
        let kept = if keeps { operand(m * n, c.element, BEST_ALIGNMENT)? } else { 0 };
        let epilogue = Epilogue::from_code(kind.epilogue, bias, kept)
            .ok_or_else(|| Error::internal(format!("{kind} with an unknown operation")))?;
        let shape = Gemm { m, n, k, ta, tb, acc: adds };
        Ok(Scratch {
            product: MatmulDesc { shape, strides, a, b, c, from: c.pointer, epilogue },
            _operands: operands,
        })
    }

    /// Returns the milliseconds of `candidate.times` matmuls, or `None` if cuBLASLt refuses the
    /// algorithm.
    fn measured(&self, candidate: &Candidate, product: &MatmulDesc) -> Result<Option<f32>> {
        let stream = &self.0.compute;
        let workspace = self.0.workspace.pointer();
        let Candidate { algorithm, times, .. } = candidate;
        let begun = self.recorded_event()?;
        if !self.0.matmul.run_with(
            *algorithm,
            product,
            workspace,
            stream.cu_stream().cast(),
            *times,
        )? {
            return Ok(None);
        }
        let ended = self.recorded_event()?;
        milliseconds(&begun, &ended).map(Some)
    }

    /// Returns a new event with a timer that is recorded on the compute stream.
    fn recorded_event(&self) -> Result<CudaEvent> {
        let stream = &self.0.compute;
        let event = stream.context().new_event(Some(CUevent_flags::CU_EVENT_DEFAULT));
        let event = check("make an event", event)?;
        check("record an event", event.record(stream))?;
        Ok(event)
    }

    /// Measures the proposals, and returns those that cuBLASLt does not refuse.
    fn race(
        &self,
        proposals: Vec<MatmulAlgorithm>,
        product: &MatmulDesc,
    ) -> Result<Vec<Candidate>> {
        let mut candidates = Vec::with_capacity(proposals.len());
        for (place, algorithm) in proposals.into_iter().enumerate() {
            let mut candidate = Candidate { algorithm, place, times: 1, took: vec![] };
            // The first matmul loads the kernel.
            if self.measured(&candidate, product)?.is_none() {
                continue;
            }
            if let Some(once) = self.measured(&candidate, product)? {
                candidate.times = ((LEAST / once).ceil() as usize).clamp(1, MOST_TIMES);
                candidates.push(candidate);
            }
        }
        // Candidates are interleaved, so that a change of clock rates affects all of them.
        for _ in 0..ROUNDS {
            for candidate in &mut candidates {
                let refused =
                    || Error::device("cuBLASLt refused an algorithm that it had accepted");
                let took = self.measured(candidate, product)?.ok_or_else(refused)?;
                candidate.took.push(took / candidate.times as f32);
            }
        }
        Ok(candidates)
    }
}

/// Returns the choice of the heuristic's first algorithm.
fn first_of(product: &MatmulKey, algorithm: MatmulAlgorithm) -> ChosenAlgorithm {
    ChosenAlgorithm { product: *product, algorithm, place: 0 }
}

impl MatmulAlgorithms for Cuda {
    fn device_and_version(&self) -> String {
        let ((major, minor), version) = (self.device().capability, self.0.matmul.version());
        format!("{}, compute capability {major}.{minor}, cuBLASLt {version}", self.device().name)
    }

    fn seen(&self) -> Vec<MatmulKey> {
        self.0.matmul.planned_kinds()
    }

    fn accepts(&self, chosen: &ChosenAlgorithm) -> Result<bool> {
        self.0.matmul.supports(&chosen.product, chosen.algorithm)
    }

    fn heuristic(&self, product: &MatmulKey) -> Result<Option<ChosenAlgorithm>> {
        Ok(self.0.matmul.proposals(product, 1)?.first().map(|first| first_of(product, *first)))
    }

    fn measure(&self, kind: &MatmulKey) -> Result<Option<ChosenAlgorithm>> {
        let proposals = self.0.matmul.proposals(kind, PROPOSALS)?;
        let Some(first) = proposals.first() else { return Ok(None) };
        let first = first_of(kind, *first);
        if proposals.len() == 1 {
            return Ok(Some(first));
        }
        let scratch = match self.scratch(kind) {
            Ok(scratch) => scratch,
            // The memory that is free between steps may not hold the operands: a pipeline stage on
            // another rank may have larger ones.
            Err(e) if e.kind() == Kind::Input => {
                log::warn!(
                    "{kind} is not measured, cuBLASLt's default algorithm is used: {}",
                    e.message()
                );
                return Ok(Some(first));
            }
            Err(e) => return Err(e),
        };
        let mut candidates = self.race(proposals, &scratch.product)?;
        let seconds: Vec<f64> = candidates.iter_mut().map(Candidate::seconds).collect();
        log::debug!("{kind}: {seconds:?} s");
        let best = candidates.get(fastest(&seconds));
        Ok(Some(best.map_or(first, |best| ChosenAlgorithm {
            algorithm: best.algorithm,
            place: best.place,
            ..first
        })))
    }

    fn choose(&self, chosen: &[ChosenAlgorithm]) {
        self.0.matmul.set_algorithms(chosen);
    }
}
