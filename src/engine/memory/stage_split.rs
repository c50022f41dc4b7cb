//! Splits blocks into pipeline stages that fit into memory.

use std::ops::Range;

use super::budget::MemoryBudget;
use super::estimate::{BaselineMemory, estimate};
use hpctrain_config::ResolvedConfig;
use hpctrain_device::Kernels;
use hpctrain_parallel::partition;

/// Returns the split with the least work in the busiest stage, of all whose stages fit into `room`.
/// Returns `None` if there is none.
pub fn split_to_fit<B: Kernels>(
    plan: &ResolvedConfig,
    held: BaselineMemory,
    room: MemoryBudget,
) -> Option<Vec<Range<usize>>> {
    let work = plan.network.work_per_block(plan.config.parallel.recompute);
    let blocks = work.len();
    let stages = plan.mesh.pipeline;
    let mut tried = ResolvedConfig { stages: vec![], ..plan.clone() };
    let mut fits = |stage: usize, blocks_of: Range<usize>| {
        tried.stages = with_stage(blocks, stages, stage, blocks_of);
        room.holds(&estimate::<B>(&tried, stage, held))
    };
    // The last end that fits, by stage and first block. More blocks need more memory.
    let mut ends = vec![vec![0; blocks]; stages];
    for (stage, ends) in ends.iter_mut().enumerate() {
        for (start, end) in ends.iter_mut().enumerate().skip(stage) {
            let most = blocks.saturating_sub(stages - 1 - stage);
            *end = (start + 1..=most)
                .take_while(|&end| fits(stage, start..end))
                .last()
                .unwrap_or(start);
        }
    }
    partition(&work, stages, |stage, part| part.end <= ends[stage][part.start])
}

/// Returns a split into `stages` in which stage `index` has these blocks, and each other stage at
/// least one.
fn with_stage(
    blocks: usize,
    stages: usize,
    index: usize,
    of_stage: Range<usize>,
) -> Vec<Range<usize>> {
    let before = 0..index;
    let behind = index + 1..stages;
    let first =
        before.map(|stage| stage..if stage + 1 == index { of_stage.start } else { stage + 1 });
    let last = behind.map(|stage| {
        let start = of_stage.end + stage - index - 1;
        start..if stage + 1 == stages { blocks } else { start + 1 }
    });
    first.chain([of_stage.clone()]).chain(last).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use hpctrain_config::{Environment, Sources, load, resolve};
    use hpctrain_cpu::Cpu;

    #[test]
    fn every_cut_has_all_blocks() {
        assert_eq!(with_stage(7, 4, 0, 0..2), [0..2, 2..3, 3..4, 4..7]);
        assert_eq!(with_stage(7, 4, 2, 3..5), [0..1, 1..3, 3..5, 5..7]);
        assert_eq!(with_stage(7, 4, 3, 5..7), [0..1, 1..2, 2..5, 5..7]);
    }

    #[test]
    fn blocks_move_to_the_stage_that_has_room() {
        // The first stage has the moments of a large embedding table, for which only the last one
        // has work.
        let overrides = [
            "model.layers=8",
            "model.width=128",
            "model.vocabulary=6000",
            "parallel.pipeline=2",
            "batch.micro=1",
        ];
        let (config, _) =
            load(&Sources { overrides: &overrides.map(String::from), ..Sources::default() })
                .unwrap();
        let plan = resolve(
            config,
            &Environment { ranks: 2, threads: 1, vocabulary: Some(6000), on_gpu: false },
        )
        .unwrap();
        let held = BaselineMemory {
            messages: 0,
            messages_on_device: false,
            resident: 0,
            cache: 0,
            foreign_ranks: 0,
            replaced: 0,
        };
        let host =
            |plan: &ResolvedConfig| [0, 1].map(|stage| estimate::<Cpu>(plan, stage, held).host());
        let [first, last] = host(&plan);
        assert!(first > last, "{first} and {last} bytes");

        let room = |host| MemoryBudget { host, gpu: usize::MAX };
        assert_eq!(split_to_fit::<Cpu>(&plan, held, room(first)), Some(plan.stages.clone()));
        let cut = split_to_fit::<Cpu>(&plan, held, room(first - 1)).unwrap();
        assert_eq!((cut[0].end, cut[1].end), (plan.stages[0].end - 1, 10));
        assert!(
            host(&ResolvedConfig { stages: cut, ..plan.clone() }).iter().all(|need| *need < first)
        );
        assert_eq!(split_to_fit::<Cpu>(&plan, held, room(last / 2)), None);
    }
}
