//! Evaluation and prediction on any number of ranks: loads a checkpoint of any layout, evaluates it
//! on the validation rows of a data set, and writes the network's output for each row to an HDF5
//! file.
//!
//! ```sh
//! examples/09-own-table.sh    # creates a run and its data in a directory that it prints
//! mpirun -np 2 target/release/examples/evaluate_predict DIR/runs/one DIR/data predictions.h5
//! ```

use std::path::Path;
use std::process::ExitCode;

use hpctrain::checkpoint::Reader;
use hpctrain::checkpoint::tools::resolve_path;
use hpctrain::data::Split;
use hpctrain::evaluate::predictions::{OutputSchema, RowIds};
use hpctrain::evaluate::{Predictions, model, predict};
use hpctrain::prelude::*;

fn main() -> ExitCode {
    start(|comm| {
        let world = comm.world();
        let args: Vec<String> = std::env::args().skip(1).collect();
        let [run, data, out] = args.as_slice() else {
            return Err(
                Error::input("arguments: a run or checkpoint, its data, a file to write").shared()
            );
        };

        // The checkpoint's configuration, for this data, with the network sharded over these ranks.
        let (path, _lease) = resolve_path::checkpoint_collective(&world, Path::new(run))?;
        let mut reader = Reader::open_collective(&world, &path, || Reader::open(&path))?;
        let config = world.all_ok(model::config_on(&reader, &[], Some(Path::new(data))))?;
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let plan = world.all_ok(model::plan(
            config,
            comm.size(),
            (cores / comm.node().local_size).max(1),
            false,
        ))?;
        let mut model = model::build(comm, &plan, Cpu::new(plan.threads))?;
        model::load(&world, &mut model, &mut reader)?;

        // Chunks of rows are distributed over the ranks, and their sums are added in row order.
        // Rows are scaled as in training.
        let mut rows = micro_batches::open_together(&world, |index| {
            micro_batches::validation(index, &plan.config)
        })?;
        world.all_ok(reader.manifest().conform(&mut rows))?;
        let measures = Evaluator::new(rows, None, plan.config.eval.batch).measure(
            &mut model,
            &world,
            || false,
        )?;
        if let Some(measures) = measures.filter(|_| comm.rank() == 0) {
            println!("step {}: {measures}", reader.manifest().step);
        }

        // The same rows without their targets, which may be missing. One rank writes the file.
        let mut rows = micro_batches::open_together(&world, |index| {
            micro_batches::open_inputs(index, &plan.config, Split::Validation)
        })?;
        world.all_ok(reader.manifest().conform(&mut rows))?;
        let schema = OutputSchema::for_plan(&plan, reader.manifest().preprocessing.as_ref());
        let create = || {
            Predictions::create(Path::new(out), rows.samples() as usize, schema, RowIds::numbers())
        };
        let file = world.all_ok((comm.rank() == 0).then(create).transpose())?;
        predict(&mut model, rows, plan.config.eval.batch, file)
    })
}
