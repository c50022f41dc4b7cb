//! `hpctrain predict`: writes the outputs of a model for every row of its input, on any number of
//! ranks.

use std::path::{Path, PathBuf};

use clap::Args;
use tempfile::TempDir;

use super::with_checkpoint::{self, CheckpointCommand, LoadedCheckpoint, SplitChoice};
use crate::backend::Kernels;
use crate::checkpoint::Reader;
use crate::comm::{Group, Launch};
use crate::config::{Config, Data, ResolvedConfig};
use crate::data::import::{
    InputFormat, Missing, TableFormat, UnknownValues, Unlabelled, column_texts, unknown_note,
};
use crate::data::{Dataset, Preprocessing, ShardIndex};
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
    /// A checkpoint, or a run whose newest checkpoint is taken.
    #[arg(long, value_name = "DIR")]
    checkpoint: PathBuf,
    /// Input rows, with or without targets: a table (.csv, .tsv), a NumPy array (.npy), a folder of
    /// PNG and JPEG images, an HDF5 file (.h5), or a directory of shards.
    #[arg(long, alias = "data", value_name = "PATH")]
    input: PathBuf,
    /// Which shards of a directory [default: validation shards, if there are any]
    #[arg(long, value_enum)]
    split: Option<SplitChoice>,
    /// The file to write; its extension selects the format: a table (.csv), JSON lines (.jsonl) or
    /// HDF5 (.h5).
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    /// Columns of a table to copy to the predictions, instead of the row number.
    #[arg(long, value_name = "COLUMN,…", value_delimiter = ',')]
    keep: Vec<String>,
    #[command(flatten)]
    format: TableFormat,
    /// Handling of missing numbers of a table: fail, or fill in the column's mean in the
    /// training data or a number [default: as for the training data, else error]
    #[arg(long, value_name = "error|mean|NUMBER", allow_negative_numbers = true)]
    missing: Option<Missing>,
    /// Override one key of the configuration, such as run.device=cpu or eval.batch=1000 (rows per
    /// forward pass); may be repeated.
    #[arg(long = "set", value_name = "SECTION.KEY=VALUE")]
    overrides: Vec<String>,
}

impl PredictArgs {
    /// Opens the input rows.
    fn open(&self, index: &mut ShardIndex, plan: &ResolvedConfig) -> Result<Dataset> {
        micro_batches::open_inputs(
            index,
            &plan.config,
            with_checkpoint::split(&plan.config, self.split)?,
        )
    }

    /// Refuses language models, which have no outputs for rows, and options that do not apply to
    /// this form of input.
    fn check(&self, plan: &ResolvedConfig, form: InputFormat) -> Result<()> {
        if plan.network.is_language() {
            return Err(Error::input("a language model predicts tokens of a text")
                .hint("hpctrain sample continues one; hpctrain eval measures it"));
        }
        let table_options = [
            ("--keep", !self.keep.is_empty()),
            ("--missing", self.missing.is_some()),
            (
                "--delimiter, --decimal-comma, --na and --no-header",
                self.format != TableFormat::default(),
            ),
        ];
        match table_options.iter().find(|(_, is_given)| *is_given && form != InputFormat::Table) {
            Some((options, _)) => {
                Err(Error::input(format!("{options}: {} is not a table", self.input.display()))
                    .hint("omit it, or give a table: --input FILE.csv"))
            }
            None => Ok(()),
        }
    }

    /// Returns the columns that identify rows: file names of images, the columns of `--keep`, or
    /// row numbers.
    fn row_ids(&self, form: InputFormat, rows: &Unlabelled) -> Result<RowIds> {
        match form {
            InputFormat::Images => Ok(RowIds::columns(
                vec!["file".to_owned()],
                rows.images()?.into_iter().map(|name| Ok(vec![name])),
            )),
            InputFormat::Table if !self.keep.is_empty() => Ok(RowIds::columns(
                self.keep.clone(),
                column_texts(&self.input, &self.format, &self.keep)?,
            )),
            _ => Ok(RowIds::numbers()),
        }
    }

    /// Converts the input to shards in a temporary directory next to the output, which all ranks
    /// can read. Returns its path, and on rank 0 the rows. Collective.
    fn shards<B: Kernels>(
        &self,
        world: &Group<B>,
        form: InputFormat,
        rows: &Unlabelled,
    ) -> Result<(PathBuf, Option<ImportedRows>)> {
        // The import may take longer than the timeout of messages.
        let imported =
            world.with_keepalive((world.rank() == 0).then_some(|| self.import(form, rows)))?;
        let path =
            imported.as_ref().map(|rows| rows.directory.path().to_path_buf().into_os_string());
        let gathered = world
            .gather_bytes(path.map_or(vec![], std::os::unix::ffi::OsStringExt::into_vec))
            .wait()?;
        let path = <std::ffi::OsStr as std::os::unix::ffi::OsStrExt>::from_bytes(&gathered[0]);
        Ok((Path::new(path).to_path_buf(), imported))
    }

    /// Converts the input to shards in a temporary directory next to the output.
    fn import(&self, form: InputFormat, rows: &Unlabelled) -> Result<ImportedRows> {
        // Fails before a long import if a column is missing.
        self.row_ids(form, rows)?;
        let directory = tempfile::Builder::new().prefix(".predict-").tempdir_in(folder(&self.out));
        let directory =
            directory.map_err(|e| Error::io("create a directory for rows beside", &self.out, e))?;
        let unknown = rows.import(form, directory.path())?;
        Ok(ImportedRows { directory, unknown })
    }
}

/// Rows that were converted to shards.
struct ImportedRows {
    /// Removes the shards when it is dropped.
    directory: TempDir,
    /// The values that the model does not know.
    unknown: Vec<UnknownValues>,
}

impl CheckpointCommand for PredictArgs {
    fn config(&self, reader: &Reader) -> Result<Config> {
        model::config_on(reader, &self.overrides, Some(&self.input))
    }

    fn execute<B: Kernels>(&self, mut found: LoadedCheckpoint<'_, B>) -> Result<()> {
        let form = found.world.all_ok(InputFormat::from_path(&self.input))?;
        found.world.all_ok(self.check(&found.plan, form))?;
        let manifest = found.reader.manifest();
        // The manifest keeps the tokenizer in a separate field.
        let learned = manifest
            .preprocessing
            .clone()
            .map(|learned| Preprocessing { tokenizer: manifest.tokenizer.clone(), ..learned });
        let schema = OutputSchema::for_plan(&found.plan, learned.as_ref());
        let rows = Unlabelled {
            input: self.input.clone(),
            format: self.format.clone(),
            missing: self.missing,
            learned: learned.unwrap_or_default(),
            shape: found.plan.config.model.input.clone().unwrap_or_default(),
        };
        let (dataset, imported) = if form == InputFormat::Hdf5 {
            (found.data(|index, plan| self.open(index, plan))?, None)
        } else {
            let (path, imported) = self.shards(&found.world, form, &rows)?;
            let own = &found.plan.config.data;
            let path = path.display().to_string();
            found.plan.config.data =
                Data { path, image_layout: own.image_layout, scale: own.scale, ..Data::default() };
            // These rows are always scaled as in training, so the notes about it are not logged.
            (found.data_with_notes(|index, plan| self.open(index, plan))?.0, imported)
        };
        let mut model = found.network()?;
        let LoadedCheckpoint { plan, world, .. } = &found;
        let samples = dataset.samples();
        // The last pipeline stage has the outputs.
        let writes = model.sharded.stage().is_last() && model.sharded.data().rank() == 0;
        let create =
            || Predictions::create(&self.out, samples as usize, schema, self.row_ids(form, &rows)?);
        let output = world.all_ok(writes.then(create).transpose())?;
        predict(&mut model, dataset, plan.config.eval.batch, output)?;
        // The temporary shards are removed only after every rank has read them.
        world.all_ok(Ok(()))?;
        if world.rank() == 0 {
            say(format_args!("{}: outputs of {} rows", self.out.display(), grouped(samples)));
            let unknown = imported.as_ref().and_then(|rows| unknown_note(&rows.unknown));
            unknown.iter().for_each(say);
        }
        Ok(())
    }
}

/// Runs one rank and returns its exit code.
pub fn run(args: &PredictArgs, launch: Option<&Launch>) -> i32 {
    with_checkpoint::run(args, &args.checkpoint, &args.overrides, launch)
}
