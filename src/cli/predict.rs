//! `hpctrain predict`: outputs of a network for every row of its input, on any number of ranks.

use std::path::{Path, PathBuf};

use clap::Args;
use tempfile::TempDir;

use super::with_checkpoint::{self, LoadedCheckpoint, SplitChoice, Work};
use crate::backend::Kernels;
use crate::checkpoint::Reader;
use crate::comm::{Group, Launch};
use crate::config::{Config, Data, ResolvedConfig};
use crate::data::import::{Form, Missing, TableFormat, Unlabelled, column_texts};
use crate::data::{Dataset, ShardIndex};
use crate::engine::micro_batches;
use crate::error::{Error, Result};
use crate::evaluate::predictions::{OutputSchema, RowIds, folder};
use crate::evaluate::{Predictions, model, predict};
use crate::telemetry::{grouped, say};

/// Arguments of `hpctrain predict`.
#[derive(Args)]
#[command(
    after_help = "Example: hpctrain predict --checkpoint runs/iris --input new.csv --out predictions.csv\n         hpctrain predict --checkpoint runs/photos --input new-photos --out predictions.jsonl"
)]
pub struct PredictArgs {
    /// A checkpoint, or a run, of which the newest is taken.
    #[arg(long, value_name = "DIR")]
    checkpoint: PathBuf,
    /// Rows of inputs; targets are not needed: a table (.csv, .tsv), an array of NumPy (.npy), a
    /// folder of PNG and JPEG images, an HDF5 file (.h5), or a directory of shards.
    #[arg(long, alias = "data", value_name = "PATH")]
    input: PathBuf,
    /// Of a directory of shards, which of them [default: those for validation, if there are any]
    #[arg(long, value_enum)]
    split: Option<SplitChoice>,
    /// The file to write, in the form of its name: a table (.csv), lines of JSON (.jsonl) or HDF5
    /// (.h5).
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    /// Columns of a table that are written beside the predictions, in the place of the number of
    /// the row.
    #[arg(long, value_name = "COLUMN,…", value_delimiter = ',')]
    keep: Vec<String>,
    #[command(flatten)]
    format: TableFormat,
    /// Missing numbers of a table: an error, filled up with the column's mean in the training data,
    /// or with a number [default: as in the training data, else error]
    #[arg(long, value_name = "error|mean|NUMBER", allow_negative_numbers = true)]
    missing: Option<Missing>,
    /// A key of the configuration, such as run.device=cpu or eval.batch=1000 (rows computed at
    /// once); repeatable.
    #[arg(long = "set", value_name = "SECTION.KEY=VALUE")]
    overrides: Vec<String>,
}

impl PredictArgs {
    /// The rows of inputs, for a network that gives outputs for rows.
    fn open(&self, catalogue: &mut ShardIndex, plan: &ResolvedConfig) -> Result<Dataset> {
        micro_batches::inputs(
            catalogue,
            &plan.config,
            with_checkpoint::split(&plan.config, self.split)?,
        )
    }

    /// Refuses a network that gives no outputs for rows, and options that this form of input does
    /// not have.
    fn check(&self, plan: &ResolvedConfig, form: Form) -> Result<()> {
        if plan.network.is_language() {
            return Err(Error::input("a language model predicts tokens of a text")
                .hint("hpctrain sample continues one; hpctrain eval measures it"));
        }
        let of_tables = [
            ("--keep", !self.keep.is_empty()),
            ("--missing", self.missing.is_some()),
            (
                "--delimiter, --decimal-comma, --na and --no-header",
                self.format != TableFormat::default(),
            ),
        ];
        match of_tables.iter().find(|(_, is_given)| *is_given && form != Form::Table) {
            Some((options, _)) => {
                Err(Error::input(format!("{options}: {} is no table", self.input.display()))
                    .hint("leave it out, or give a table: --input FILE.csv"))
            }
            None => Ok(()),
        }
    }

    /// Columns that tell rows apart: names of images, those of a table that are kept, or else
    /// numbers.
    fn beside(&self, form: Form, rows: &Unlabelled) -> Result<RowIds> {
        match form {
            Form::Images => Ok(RowIds::columns(
                vec!["file".to_owned()],
                rows.images()?.into_iter().map(|name| Ok(vec![name])),
            )),
            Form::Table if !self.keep.is_empty() => Ok(RowIds::columns(
                self.keep.clone(),
                column_texts(&self.input, &self.format, &self.keep)?,
            )),
            _ => Ok(RowIds::numbers()),
        }
    }

    /// Brings the input into the form of shards, in a directory beside the output that all ranks
    /// see; it goes with what is returned, by rank 0. Collective.
    fn shards<B: Kernels>(
        &self,
        world: &Group<B>,
        form: Form,
        rows: &Unlabelled,
    ) -> Result<(PathBuf, Option<TempDir>)> {
        let import = || {
            // A column that is missing shows before a long import.
            self.beside(form, rows)?;
            let directory =
                tempfile::Builder::new().prefix(".predict-").tempdir_in(folder(&self.out));
            let directory = directory
                .map_err(|e| Error::io("create a directory for rows beside", &self.out, e))?;
            rows.import(form, directory.path())?;
            Ok(directory)
        };
        // It may take longer than any message.
        let directory = world.with_keepalive((world.rank() == 0).then_some(import))?;
        let path =
            directory.as_ref().map(|directory| directory.path().to_path_buf().into_os_string());
        let told = world
            .gather_bytes(path.map_or(vec![], std::os::unix::ffi::OsStringExt::into_vec))
            .wait()?;
        let path = <std::ffi::OsStr as std::os::unix::ffi::OsStrExt>::from_bytes(&told[0]);
        Ok((Path::new(path).to_path_buf(), directory))
    }
}

impl Work for PredictArgs {
    fn config(&self, reader: &Reader) -> Result<Config> {
        model::config_on(reader, &self.overrides, Some(&self.input))
    }

    fn on<B: Kernels>(&self, mut found: LoadedCheckpoint<'_, B>) -> Result<()> {
        let form = found.world.all_ok(Form::of(&self.input))?;
        found.world.all_ok(self.check(&found.plan, form))?;
        let learned = found.reader.manifest().preprocessing.clone();
        let meaning = OutputSchema::of(&found.plan, learned.as_ref());
        let rows = Unlabelled {
            input: self.input.clone(),
            format: self.format.clone(),
            missing: self.missing,
            learned: learned.unwrap_or_default(),
            shape: found.plan.config.model.input.clone().unwrap_or_default(),
        };
        let (dataset, _directory) = if form == Form::Hdf5 {
            (found.data(|catalogue, plan| self.open(catalogue, plan))?, None)
        } else {
            let (path, directory) = self.shards(&found.world, form, &rows)?;
            let own = &found.plan.config.data;
            let path = path.display().to_string();
            found.plan.config.data =
                Data { path, image_layout: own.image_layout, scale: own.scale, ..Data::default() };
            // That such rows get the network's scale goes without saying.
            (found.converted(|catalogue, plan| self.open(catalogue, plan))?.0, directory)
        };
        let mut model = found.network()?;
        let LoadedCheckpoint { plan, world, .. } = &found;
        let samples = dataset.samples();
        // The last stage of a pipeline has the outputs.
        let writes = model.sharded.stage().is_last() && model.sharded.data().rank() == 0;
        let create =
            || Predictions::create(&self.out, samples as usize, meaning, self.beside(form, &rows)?);
        let to = world.all_ok(writes.then(create).transpose())?;
        predict(&mut model, dataset, plan.config.eval.batch, to)?;
        // Shards that were made for this stay until every rank has read them.
        world.all_ok(Ok(()))?;
        if world.rank() == 0 {
            say(format_args!("{}: outputs of {} rows", self.out.display(), grouped(samples)));
        }
        Ok(())
    }
}

/// Runs the subcommand; returns the exit code.
pub fn run(args: &PredictArgs, launch: Option<&Launch>) -> i32 {
    with_checkpoint::run(args, &args.checkpoint, &args.overrides, launch)
}
