//! The order of samples if files are dealt to ranks, each of which reads only its own.

use super::{Draw, ExcludedSamples, Sampler};
use hpctrain_base::error::{Error, Result};
use hpctrain_base::random::{derive, name};

/// The part of each global batch that one rank reads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RankBatches {
    /// The position of the first sample of the first global batch.
    pub first: u64,
    /// The number of samples of a global batch.
    pub global: u64,
    /// The number of samples of a virtual rank.
    pub virtual_rank_samples: u64,
    /// The virtual ranks of this rank, in the order of their use.
    pub virtual_ranks: Vec<usize>,
    /// The number of ranks that read.
    pub ranks: usize,
    /// The number of this rank among them.
    pub rank: usize,
}

/// Maps the positions of a rank to samples of the files that are dealt to it. Every rank passes over its samples by
/// itself: a rank with fewer samples begins its next pass sooner.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileOrder {
    /// For each file of the rank: the number of samples in its files before, and the number of its
    /// first sample in the numbering of all samples.
    files: Vec<(u64, u64)>,
    sampler: Sampler,
    batches: RankBatches,
}

impl FileOrder {
    /// Creates the order of a rank. `files` has the number of samples of each file; file `i` is
    /// read by rank `i % ranks`. The samples of a rank are shuffled by `seed`, or visited in the
    /// order of the files without one.
    ///
    /// # Errors
    /// Returns an error if the rank has no samples.
    pub fn new(files: &[u64], seed: Option<u64>, batches: RankBatches) -> Result<Self> {
        let RankBatches { ranks, rank, .. } = batches;
        let mut own = Vec::with_capacity(files.len() / ranks.max(1) + 1);
        let mut samples = 0;
        let mut first = 0;
        for (number, count) in files.iter().enumerate() {
            if number % ranks == rank && *count > 0 {
                own.push((samples, first));
                samples += count;
            }
            first += count;
        }
        if samples == 0 {
            return Err(Error::input(format!(
                "data.order = files leaves data-parallel rank {rank} of {ranks} without samples: \
                 there are {} training shards",
                files.len()
            ))
            .hint(format!(
                "import the data with --shards {ranks} or a multiple, start fewer ranks, or set \
                 data.order=samples"
            )));
        }
        let sampler = match seed {
            Some(seed) => Sampler::new(samples, derive(seed, &[name("files"), rank as u64])),
            None => Sampler::in_order(samples),
        };
        Ok(Self { files: own, sampler, batches })
    }

    /// Returns the number of samples of the rank.
    pub fn samples(&self) -> u64 {
        self.sampler.samples()
    }

    /// Returns the number of samples that the rank reads of `positions` positions of all ranks.
    pub(super) fn share(&self, positions: u64) -> u64 {
        positions / self.batches.ranks as u64
    }

    /// Returns the sample at `position`, which must be one of this rank.
    pub(super) fn draw(&self, position: u64) -> Draw {
        let RankBatches { first, global, virtual_rank_samples, virtual_ranks, .. } = &self.batches;
        let within = (position - first) % global;
        let virtual_rank = (within / virtual_rank_samples) as usize;
        let place = virtual_ranks.iter().position(|own| *own == virtual_rank).unwrap_or(0) as u64;
        // All ranks have read equal parts of the positions before this batch.
        let own = self.share(position - within)
            + place * virtual_rank_samples
            + within % virtual_rank_samples;
        Draw { sample: self.sample(self.sampler.index(own)), epoch: own / self.samples() }
    }

    /// Returns the number, among all samples, of sample `index` of the rank.
    pub(super) fn sample(&self, index: u64) -> u64 {
        let file = self.files.partition_point(|(before, _)| *before <= index) - 1;
        let (before, first) = self.files[file];
        first + index - before
    }

    /// Returns the positions of this rank in the global batch from `base` on.
    pub(super) fn positions(&self, base: u64) -> impl Iterator<Item = u64> {
        let RankBatches { virtual_rank_samples, virtual_ranks, .. } = &self.batches;
        virtual_ranks.iter().flat_map(move |virtual_rank| {
            let start = base + *virtual_rank as u64 * virtual_rank_samples;
            start..start + virtual_rank_samples
        })
    }

    /// Returns the number of samples of the rank that are excluded.
    pub(super) fn count(&self, excluded: &ExcludedSamples) -> u64 {
        let ends = self.files.iter().skip(1).map(|(before, _)| *before).chain([self.samples()]);
        let files = self.files.iter().zip(ends);
        files.map(|((before, first), end)| excluded.count_in(*first..first + end - before)).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the samples that rank `rank` of two draws in this number of global batches of 8, of
    /// four virtual ranks, from position `first` on.
    fn drawn(files: &[u64], seed: Option<u64>, rank: usize, first: u64, batches: u64) -> Vec<Draw> {
        let virtual_ranks = [[0, 1], [2, 3]][rank].to_vec();
        let positions: Vec<u64> = (0..batches)
            .flat_map(|batch| (0..4).map(move |i| first + 8 * batch + 4 * rank as u64 + i))
            .collect();
        let batches = RankBatches {
            first,
            global: 8,
            virtual_rank_samples: 2,
            virtual_ranks,
            ranks: 2,
            rank,
        };
        let order = FileOrder::new(files, seed, batches).unwrap();
        positions.into_iter().map(|position| order.draw(position)).collect()
    }

    #[test]
    fn a_rank_sees_each_sample_of_its_files_once_per_pass() {
        // Rank 0 has the samples 0 to 2, 8 to 10 and 15; rank 1 has 3 to 7 and 11 to 14.
        let files = [3, 5, 3, 4, 1];
        for (rank, own) in [vec![0, 1, 2, 8, 9, 10, 15], vec![3, 4, 5, 6, 7, 11, 12, 13, 14]]
            .into_iter()
            .enumerate()
        {
            let draws = drawn(&files, Some(7), rank, 0, 9);
            for pass in 0..3 {
                let start = pass * own.len();
                let mut seen: Vec<u64> =
                    draws[start..start + own.len()].iter().map(|draw| draw.sample).collect();
                assert!(draws[start..start + own.len()].iter().all(|d| d.epoch == pass as u64));
                assert_ne!(seen, own, "shuffled");
                seen.sort_unstable();
                assert_eq!(seen, own);
            }
            let in_order = drawn(&files, None, rank, 0, 1);
            assert!(in_order.iter().map(|draw| draw.sample).eq(own[..4].iter().copied()));
        }
    }

    #[test]
    fn a_resumed_run_goes_on_where_it_was() {
        let files = [30, 50, 40, 10];
        for rank in 0..2 {
            let whole = drawn(&files, Some(1), rank, 0, 6);
            assert_eq!(whole[8..], drawn(&files, Some(1), rank, 16, 4));
        }
    }

    #[test]
    fn virtual_ranks_are_in_the_order_of_their_use() {
        let batches = RankBatches {
            first: 0,
            global: 8,
            virtual_rank_samples: 2,
            virtual_ranks: vec![0, 2],
            ranks: 2,
            rank: 0,
        };
        let order = FileOrder::new(&[100, 100], None, batches).unwrap();
        let samples = [0, 1, 4, 5, 8, 9, 12, 13].map(|position| order.draw(position).sample);
        assert_eq!(samples, [0, 1, 2, 3, 4, 5, 6, 7]);
    }

    #[test]
    fn a_rank_without_samples_is_refused() {
        let batches = |ranks, rank| RankBatches {
            first: 0,
            global: 8,
            virtual_rank_samples: 1,
            virtual_ranks: vec![rank],
            ranks,
            rank,
        };
        assert!(FileOrder::new(&[5, 5], None, batches(2, 1)).is_ok());
        for (files, ranks, rank) in [(&[5, 5][..], 3, 2), (&[5, 0], 2, 1)] {
            let error = FileOrder::new(files, None, batches(ranks, rank)).unwrap_err().to_string();
            let expected = format!(
                "data.order = files leaves data-parallel rank {rank} of {ranks} without samples: \
                 there are 2 training shards\nhint: import the data with --shards {ranks} or"
            );
            assert!(error.starts_with(&expected), "{error}");
        }
    }
}
