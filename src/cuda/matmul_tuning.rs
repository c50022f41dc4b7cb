//! Matmul autotuning: measures the algorithms that cuBLASLt proposes for a matmul, on operands of
//! its shape.
//!
//! Operands are scratch memory; no training state is read or written. Within a step, most operands
//! have left the L2 cache before they are read. So a measurement uses several sets of operands in
//! turn, which together are larger than the cache, unless the matmul is small or memory is short.

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

/// The most sets of operands for one matmul: with more, a measurement would not use all of them.
const MOST_SETS: usize = MOST_TIMES;

/// The number of random values with which operands are filled, repeatedly. Zeros would draw less
/// power than real values.
const NUMBERS: usize = 1 << 16;

/// A matmul with one or more sets of scratch operands.
struct Scratch {
    /// The matmul on each set.
    products: Vec<MatmulDesc>,
    /// The index of the set to use next.
    turn: usize,
    _operands: Vec<CudaBuf>,
}

impl Scratch {
    /// Returns the next `times` matmuls, whose sets have not been used for the longest time.
    fn in_turn(&mut self, times: usize) -> impl Iterator<Item = &MatmulDesc> {
        let first = self.turn;
        self.turn = (first + times) % self.products.len();
        self.products.iter().cycle().skip(first).take(times)
    }
}

/// Returns the number of sets of `bytes` bytes to use in turn: between two uses of a set the others
/// fill an L2 cache of `l2_bytes` bytes, unless that takes more than [`MOST_SETS`].
fn operand_sets(bytes: usize, l2_bytes: usize) -> usize {
    (1 + l2_bytes.div_ceil(bytes.max(1))).clamp(2, MOST_SETS)
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
    /// Allocates `len` values at an address that is a multiple of exactly `alignment` bytes, up to
    /// 256, and fills them with `numbers`, repeatedly. Returns the buffer and the address.
    fn operand(
        &self,
        numbers: &[f32],
        len: usize,
        element: Element,
        alignment: usize,
    ) -> Result<(CudaBuf, u64)> {
        let lead = if alignment < BEST_ALIGNMENT { alignment / element.size() } else { 0 };
        let mut buf = self.take(MemoryKind::Activations, lead + len, element)?;
        let numbers = &numbers[..numbers.len().min(lead + len)];
        self.write(numbers, buf.view_mut(0..numbers.len()))?;
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

    /// Allocates one set of operands with a matmul's shapes and alignments. Returns the matmul on
    /// them.
    fn operand_set(&self, kind: &MatmulKey, numbers: &[f32]) -> Result<(MatmulDesc, Vec<CudaBuf>)> {
        let MatmulKey {
            sizes: [m, n, k],
            strides,
            transposed: [ta, tb],
            adds,
            out_of_place,
            keeps,
            bytes,
            alignments,
            ..
        } = *kind;
        let rows = [if ta { k } else { m }, if tb { n } else { k }, m];
        let elements = bytes.map(Element::with_size);
        let mut operands = Vec::new();
        let mut operand = |len: usize, element: Element, alignment: usize| {
            let (buf, at) = self.operand(numbers, len, element, alignment)?;
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
        let from = if out_of_place { matrix(2)?.pointer } else { c.pointer };
        let bias = operand(n, c.element, BEST_ALIGNMENT)?;
        let kept = if keeps { operand(m * n, c.element, BEST_ALIGNMENT)? } else { 0 };
        let epilogue = Epilogue::from_code(kind.epilogue, bias, kept)
            .ok_or_else(|| Error::internal(format!("{kind} with an unknown operation")))?;
        let shape = Gemm { m, n, k, ta, tb, acc: adds };
        Ok((MatmulDesc { shape, strides, a, b, c, from, epilogue }, operands))
    }

    /// Allocates the operands of a matmul: as many sets as [`operand_sets`] says, or as memory
    /// holds.
    ///
    /// # Errors
    /// Returns an error if memory does not hold one set, or if the device fails.
    fn scratch(&self, kind: &MatmulKey) -> Result<Scratch> {
        let mut numbers = vec![0.0; NUMBERS];
        Stream::new(0).fill_normal(&mut numbers);
        let (product, mut operands) = self.operand_set(kind, &numbers)?;
        let views = operands.iter().map(Self::all);
        let bytes = views.map(|view| view.len * view.element.size()).sum();
        let sets = operand_sets(bytes, self.device().l2_bytes()?);
        let mut products = vec![product];
        while products.len() < sets {
            match self.operand_set(kind, &numbers) {
                Ok((product, of_set)) => {
                    products.push(product);
                    operands.extend(of_set);
                }
                Err(e) if e.kind() == Kind::Input => break,
                Err(e) => return Err(e),
            }
        }
        Ok(Scratch { products, turn: 0, _operands: operands })
    }

    /// Returns the milliseconds of `candidate.times` matmuls, or `None` if cuBLASLt refuses the
    /// algorithm.
    fn measured(
        &self,
        candidate: &Candidate,
        kind: &MatmulKey,
        scratch: &mut Scratch,
    ) -> Result<Option<f32>> {
        let begun = self.recorded_event()?;
        if !self.0.matmul.run_with(
            candidate.algorithm,
            kind,
            scratch.in_turn(candidate.times),
            self.0.workspace.pointer(),
            self.0.compute.cu_stream().cast(),
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
        kind: &MatmulKey,
        scratch: &mut Scratch,
    ) -> Result<Vec<Candidate>> {
        let mut candidates = Vec::with_capacity(proposals.len());
        for (place, algorithm) in proposals.into_iter().enumerate() {
            let mut candidate = Candidate { algorithm, place, times: 1, took: vec![] };
            // The first matmul loads the kernel.
            if self.measured(&candidate, kind, scratch)?.is_none() {
                continue;
            }
            if let Some(once) = self.measured(&candidate, kind, scratch)? {
                candidate.times = ((LEAST / once).ceil() as usize).clamp(1, MOST_TIMES);
                candidates.push(candidate);
            }
        }
        // Candidates are interleaved, so that a change of clock rates affects all of them.
        for _ in 0..ROUNDS {
            for candidate in &mut candidates {
                let refused =
                    || Error::device("cuBLASLt refused an algorithm that it had accepted");
                let took = self.measured(candidate, kind, scratch)?.ok_or_else(refused)?;
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
        let mut scratch = match self.scratch(kind) {
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
        let mut candidates = self.race(proposals, kind, &mut scratch)?;
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sets_fill_the_cache_between_two_uses_of_one() {
        const L2: usize = 50 << 20;
        for (bytes, sets) in [
            (1 << 30, 2),
            (L2, 2),
            (L2 - 1, 3),
            (20 << 20, 4),
            (6 << 20, 10),
            (1 << 10, MOST_SETS),
            (0, MOST_SETS),
        ] {
            assert_eq!(operand_sets(bytes, L2), sets, "{bytes} bytes");
            assert!(sets == MOST_SETS || (sets - 1) * bytes >= L2, "{bytes} bytes");
        }
        // The driver may not report a cache.
        assert_eq!(operand_sets(1 << 20, 0), 2);
    }

    #[test]
    fn all_sets_are_used_before_one_is_used_again() {
        let matrix = Matrix { pointer: 0, element: Element::F32 };
        let shape = Gemm { m: 1, n: 1, k: 1, ta: false, tb: false, acc: false };
        let product = |from| MatmulDesc {
            shape,
            strides: [1; 3],
            a: matrix,
            b: matrix,
            c: matrix,
            from,
            epilogue: Epilogue::None,
        };
        let products = [0, 1, 2].map(product).to_vec();
        let mut scratch = Scratch { products, turn: 0, _operands: vec![] };
        let [first, second, third] = [2, 1, 5]
            .map(|times| scratch.in_turn(times).map(|product| product.from).collect::<Vec<_>>());
        assert_eq!((first, second, third), (vec![0, 1], vec![2], vec![0, 1, 2, 0, 1]));
    }
}
