//! The configuration file: one typed tree, every key with its default.
//!
//! Optional keys are resolved by [`super::resolve`]; nothing else sees them unresolved.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use serde::de::{Error, SeqAccess, Unexpected, Visitor};
use serde::{Deserialize, Deserializer, Serialize};

use super::{DeviceChoice, DeviceMemory, Interval, Partition, Size, Staleness, Time, USUAL_PART};
use hpctrain_base::pattern::Pattern;
use hpctrain_comm::{Choice, TransportChoice};
use hpctrain_data::{Augment, Axes, ExternalFiles, InputScale, Mix, Verify};
use hpctrain_nn::layers::Layer;
use hpctrain_nn::optim::{Group, LrDecay};
use hpctrain_nn::{CustomModel, Input};
use hpctrain_parallel::{PipelineSchedule, Storage, Zero};

/// A key as its section declares it.
pub struct Key {
    /// Its name in the section.
    pub name: &'static str,
    /// Lines that explain it.
    pub text: &'static [&'static str],
    /// Its attribute of serde, if it has one.
    attribute: &'static str,
}

impl Key {
    /// Whether files have it.
    pub fn is_in_files(&self) -> bool {
        self.attribute != "serde(skip)"
    }
}

/// Sections, each key with its explanation, an attribute of its own in brackets, its type and
/// default.
macro_rules! sections {
    ($(
        $(#[doc = $doc:literal])* $name:ident {
            $($(#[doc = $text:literal])* $([$attribute:meta])? $field:ident: $type:ty = $default:expr,)*
        }
    )*) => {$(
        $(#[doc = $doc])*
        #[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
        #[serde(default, deny_unknown_fields)]
        pub struct $name {
            $($(#[doc = $text])* $(#[$attribute])? pub $field: $type,)*
        }

        impl $name {
            /// Its keys, in order.
            pub const KEYS: &'static [Key] = &[
                $(Key {
                    name: stringify!($field),
                    text: &[$($text),*],
                    attribute: stringify!($($attribute)?),
                },)*
            ];
        }

        impl Default for $name {
            fn default() -> Self {
                Self { $($field: $default,)* }
            }
        }
    )*};
}

/// A pattern that is known to be valid.
fn pattern(text: &str) -> Pattern {
    text.parse().expect("a valid glob pattern")
}

sections! {
    /// The whole file.
    Config {
        /// The run: its directory, device and length.
        run: Run = Run::default(),
        /// The network.
        model: Model = Model::default(),
        /// The loss.
        loss: Loss = Loss::default(),
        /// The data.
        data: Data = Data::default(),
        /// Samples a step.
        batch: Batch = Batch::default(),
        /// The update rule.
        optimizer: Optimizer = Optimizer::default(),
        /// The learning rate over time.
        lr_schedule: LrSchedule = LrSchedule::default(),
        /// The layout over ranks.
        parallel: Parallel = Parallel::default(),
        /// Local SGD and DiLoCo.
        local_sgd: LocalSgdConfig = LocalSgdConfig::default(),
        /// CPU offload of GPUs.
        offload: Offload = Offload::default(),
        /// Parameter servers.
        parameter_server: ParameterServer = ParameterServer::default(),
        /// Number formats.
        precision: Precision = Precision::default(),
        /// GPUs.
        device: Device = Device::default(),
        /// Saving.
        checkpoint: Checkpoint = Checkpoint::default(),
        /// Evaluation.
        eval: Eval = Eval::default(),
        /// Messages between ranks.
        comm: Comm = Comm::default(),
        /// Log and progress lines.
        log: Log = Log::default(),
        /// Other names by which keys were given, and the keys they were read as.
        [serde(skip)]
        aliases: BTreeMap<String, String> = BTreeMap::new(),
    }

    /// `[run]`
    Run {
        /// Directory under `root`; left out, the preset's or file's name with the next free number.
        name: Option<String> = None,
        /// Directory in which run directories are made.
        root: String = "runs".into(),
        /// Group, by name or number, whose members share the run: its directory may belong to
        /// another user if it belongs to this group. Omitted, a directory of another user is
        /// refused.
        group: Option<String> = None,
        /// Optimizer steps.
        steps: u64 = 1000,
        /// Passes over the training data, in the place of `steps`: to the step in which the last
        /// sample of the last one is seen. 0 goes by steps.
        epochs: u64 = 0,
        /// Names every random stream: weights, sample order, dropout.
        seed: u64 = 1337,
        /// Device that ranks compute on: `cpu`, `cuda` (the GPUs of the node, one a rank),
        /// `cuda:0,2` (those of them), or `auto`: GPUs where there are any.
        device: DeviceChoice = DeviceChoice::Auto,
        /// Compute threads a rank; default: the cores the rank may use, shared with its neighbours,
        /// at most the CPU quota of its control group.
        threads: Option<usize> = None,
        /// Steps in a row whose loss or gradient is not finite before the run gives up.
        max_skipped: u64 = 10,
        /// Steps between two checks for silent data corruption: replicas compare checksums of
        /// parameters and optimizer state, and each update verifies that they are as the update
        /// before it left them. 0 disables the check.
        sdc_check_every: u64 = 0,
        /// Most memory a rank may need, such as `8GiB`: a run that would need more is refused
        /// before it starts. Left out, the memory of the node is the limit.
        memory_limit: Option<Size> = None,
        /// Time limit of the job, such as `3h 50m`: it saves and ends before, with exit code 75.
        /// Left out, the end that Slurm has set, if it has; `0s` is no limit.
        time_limit: Option<Time> = None,
    }

    /// `[model]`
    Model {
        /// The family.
        kind: ModelKind = ModelKind::Gpt,
        /// Transformer blocks; of a network of kind `layers`, its layers: `[[model.layers]]`.
        layers: LayerList = LayerList::Count(4),
        /// Layers: shape of a sample, such as `[28, 28, 1]`; images have their channels last.
        input: Option<Vec<usize>> = None,
        /// Attention heads a block.
        heads: usize = 4,
        /// Llama: heads of keys and values, which that many heads of queries share; left out, as
        /// many as heads.
        kv_heads: Option<usize> = None,
        /// Width of the residual stream.
        width: usize = 128,
        /// Llama: gates of a block; left out, 8/3 of the width, rounded up to a multiple of 64.
        hidden: Option<usize> = None,
        /// Positions a sequence.
        context: usize = 64,
        /// Token ids; left out, as many as the data has.
        vocabulary: Option<usize> = None,
        /// GPT: biases in linear maps and norms; left out, there are some.
        bias: Option<bool> = None,
        /// Llama: the output matrix is the token table; left out, it is one of its own.
        tied: Option<bool> = None,
        /// Llama: base of the angles of rotary positions; left out, 10000.
        rope_theta: Option<f64> = None,
        /// `[model.rope_scaling]`, for Llamas: scaling of the frequencies of rotary positions, so
        /// that contexts may be longer than those of pre-training.
        rope_scaling: RopeScaling = RopeScaling::default(),
        /// Llama: added to the mean square in norms; left out, 1e-5.
        norm_epsilon: Option<f64> = None,
        /// Dropout rate.
        dropout: f32 = 0.0,
        /// Name of a network of a program's own, which that program alone can build.
        own: Option<CustomModel> = None,
        /// `[model.place]`, for GPUs: `tables` (`host`: the embedding tables of the first layer,
        /// their gradients and their optimizer state are in the memory of the host, which looks
        /// rows up and updates them; `device`).
        place: Place = Place::default(),
    }

    /// `[model.rope_scaling]`
    RopeScaling {
        /// Scaling: default (none), linear (all frequencies are divided by `factor`), or llama3,
        /// that of Llama 3.1 to 3.3 (low frequencies are divided by `factor`, high ones are kept,
        /// those in between are interpolated).
        rope_type: RopeType = RopeType::Default,
        /// Linear, llama3: the divisor, at least 1.
        factor: Option<f64> = None,
        /// Llama3: frequencies that turn at most this many times within the original context are
        /// divided by `factor`.
        low_freq_factor: Option<f64> = None,
        /// Llama3: frequencies that turn at least this many times within the original context are
        /// kept.
        high_freq_factor: Option<f64> = None,
        /// Llama3: the original context, the positions of a sequence in pre-training.
        original_max_position_embeddings: Option<usize> = None,
    }

    /// `[model.place]`
    Place {
        /// The embedding tables of the first layer.
        tables: EmbeddingPlacement = EmbeddingPlacement::Device,
    }

    /// `[loss]`
    Loss {
        /// The loss: cross-entropy (of classes), mse, mae, huber, or binary-cross-entropy (of
        /// logits).
        kind: LossKind = LossKind::CrossEntropy,
        /// Cross-entropy: part of the target that is spread evenly over all classes. Evaluations go
        /// without.
        label_smoothing: f32 = 0.0,
        /// Cross-entropy: a factor for each class; empty is 1 for all. Evaluations go without.
        class_weights: Vec<f32> = vec![],
        /// Huber: the distance up to which it is a square.
        huber_delta: f32 = 1.0,
    }

    /// `[data]`
    Data {
        /// A directory of shards, one file, or `bundled:tiny-shakespeare`.
        path: String = "bundled:tiny-shakespeare".into(),
        /// File names of the training shards: `*` stands for anything, `[02-4]` for one of those in
        /// brackets.
        train: Pattern = pattern("train-*.h5"),
        /// File names of the validation shards; others than these must be there.
        validation: Pattern = pattern("val-*.h5"),
        /// Part of the samples kept for validation where there are no validation shards: of rows
        /// some everywhere, of text the end; 0 trains without validation data.
        val_fraction: f64 = 0.0,
        /// Dataset with a stream of tokens.
        tokens: String = "/tokens".into(),
        /// Dataset with one sample a row.
        inputs: String = "/inputs".into(),
        /// Dataset with an id of each category a row, for networks with embedding tables.
        categories: String = "/categories".into(),
        /// Dataset with one target a row.
        targets: String = "/targets".into(),
        /// Dataset with one factor of the loss a row, for training; left out, `/weights` where
        /// shards have it; empty, none.
        weights: Option<String> = None,
        /// Layout of images in files: nhwc (height × width × channels), or nchw, which is
        /// transposed to nhwc when it is read.
        image_layout: Axes = Axes::Nhwc,
        /// Scaling of inputs: unit (unsigned bytes divided by 255) or none, in the place of the
        /// attributes `mean` and `std` of the dataset; left out, by these where there are any.
        scale: Option<InputScale> = None,
        /// Visit samples in a random order, another every epoch.
        shuffle: bool = true,
        /// Micro-batches read ahead.
        prefetch: usize = 4,
        /// Blocks of shards that are compared with their checksums as they are read: off,
        /// first-pass (each when a rank first reads of it), or always.
        verify: Verify = Verify::FirstPass,
        /// External raw files of HDF5 outside the directory of the file that names them: refuse, or
        /// allow where the data is trusted.
        external_files: ExternalFiles = ExternalFiles::Refuse,
        /// Directory on a node-local disk, such as `/tmp`, to which one rank of each node copies
        /// the shards before training; intact copies are reused. Default: shards are read where
        /// they are.
        local_cache: Option<String> = None,
        /// `[data.augment]`, for images while training: `flip` (true: mirror every other one, left
        /// to right), `shift` (move by up to so many pixels, the border repeated), `crop` (pad with
        /// so many zeros, cut out the old size).
        augment: Augment = Augment::default(),
        /// `[[data.mix]]`: several data sets in the stead of `path`, each with a `path` and a
        /// `weight`.
        mix: Vec<Mix> = vec![],
    }

    /// `[batch]`
    Batch {
        /// Samples a step, over all ranks: the contract.
        global: u64 = 16,
        /// Samples computed at once; left out, all of a virtual rank, or so many that they have 4096 tokens
        /// at most.
        micro: Option<u64> = None,
        /// With servers, where workers do not wait for each other: samples of a worker's own batch;
        /// left out, `global` over the workers, rounded.
        worker: Option<u64> = None,
    }

    /// `[optimizer]`
    Optimizer {
        /// The update rule: adamw, adam, sgd, adagrad, rmsprop, lamb, lars, lion.
        kind: OptimizerKind = OptimizerKind::Adamw,
        /// Peak learning rate.
        lr: f64 = 1e-3,
        /// AdamW, Adam, LAMB: decay of the first moment. Lion: weight of the moment in a step.
        beta1: f32 = 0.9,
        /// AdamW, Adam, LAMB: decay of the second moment. RMSProp: of the mean square. Lion: of the
        /// moment.
        beta2: f32 = 0.99,
        /// AdamW, Adam, LAMB, Adagrad, RMSProp: added to the root of squares.
        eps: f32 = 1e-8,
        /// SGD, LARS, RMSProp: decay of the momentum buffer.
        momentum: f32 = 0.9,
        /// SGD, LARS: look ahead along the momentum.
        nesterov: bool = false,
        /// LARS: the norm of a matrix's step at a learning rate of one, as a part of the matrix's
        /// own norm.
        trust: f32 = 0.001,
        /// Weight decay of matrices and tables.
        weight_decay: f32 = 0.1,
        /// Largest global norm of the gradient; 0 does not clip.
        grad_clip: f64 = 1.0,
        /// Decay of a running average of the parameters, which evaluations, predictions and exports
        /// take in their stead; 0 keeps none.
        ema: f32 = 0.0,
        /// Parameters that are updated otherwise than the rest; the first group that matches a
        /// parameter's name counts.
        groups: Vec<Group> = vec![],
    }

    /// `[lr_schedule]`
    LrSchedule {
        /// Shape of the decay after the warm-up.
        kind: LrDecay = LrDecay::Cosine,
        /// Steps of linear warm-up.
        warmup: u64 = 100,
        /// Learning rate at the end, as a fraction of the peak.
        min_ratio: f64 = 0.1,
        /// Steps of the final decay, for `wsd`; default: a tenth of the run.
        decay: Option<u64> = None,
        /// Global batch that `optimizer.lr` was tuned for: if set, the rate is scaled to
        /// `batch.global`.
        reference_batch: Option<u64> = None,
        /// Rule by which the rate is scaled.
        scaling: Scaling = Scaling::Linear,
    }

    /// `[parallel]`
    Parallel {
        /// Choice of the layout: `given`, by the keys of this section, or `auto`, the fastest that
        /// fits, as `hpctrain plan` has it; keys of this section that are given stay as they are.
        layout: LayoutMode = LayoutMode::Given,
        /// Keys of the layout that a file or `--set` gives, such as `parallel.zero`.
        [serde(skip)]
        given: BTreeSet<String> = BTreeSet::new(),
        /// ZeRO stage, 0 to 3.
        zero: Zero = Zero::Zero,
        /// Place of the parameters that are updated and of their optimizer state: `ranks`, on all
        /// of them as `zero` has it, or `central`, on some, to which the others send their
        /// gradients and from which they take new parameters.
        storage: Storage = Storage::Ranks,
        /// Central storage: ranks that hold it, each an equal part.
        owners: usize = 1,
        /// Ranks that share one copy of the parameters; left out, 1 at stage 0, else all that are
        /// left.
        shard: Option<usize> = None,
        /// Copies; left out, all ranks that are left.
        replica: Option<usize> = None,
        /// Ranks that share the blocks of a GPT or a Llama: each has some heads, some columns of
        /// the hidden layers and some rows of the vocabulary.
        tensor: usize = 1,
        /// Virtual tensor-parallel ranks: the sums of each block are reduced in a fixed tree over
        /// them. Ranks that divide them into equal groups of a power of two give the same bits.
        /// Default: `tensor`.
        virtual_tensor_ranks: Option<usize> = None,
        /// Sequence parallelism: shard activations outside of GEMMs across the ranks of `tensor`,
        /// too.
        sequence: bool = false,
        /// Stages of consecutive blocks, each on ranks of its own; micro-batches pass through them
        /// one after the other.
        pipeline: usize = 1,
        /// Blocks of every stage, such as [4, 5, 3]; left out, the cut with the least work in the
        /// busiest stage.
        stages: Option<Vec<usize>> = None,
        /// Order of a pipeline's work: `1f1b`, or `zero-bubble`, which puts the products that make
        /// gradients of weights off into time that would be idle, for more memory of activations.
        schedule: PipelineSchedule = PipelineSchedule::OneForwardOneBackward,
        /// Virtual data-parallel ranks: gradients are reduced in a fixed tree over them. Ranks
        /// that divide them into equal groups of a power of two give the same bits. Default: the
        /// data-parallel ranks.
        virtual_ranks: Option<usize> = None,
        /// ZeRO 3: blocks ahead of whose turn parameters are gathered. Each costs the memory of one
        /// block's parameters and hides a gather behind the blocks before; 0 gathers when a block
        /// needs them.
        prefetch: usize = 1,
        /// Activation checkpointing: keep only the input of each block and recompute its
        /// activations in the backward.
        recompute: bool = false,
        /// Chunked cross-entropy: language models compute the LM head and the loss in chunks of
        /// this many tokens. 0 takes all tokens of a micro-batch, or of `eval.batch`. Default:
        /// 4,096 on GPUs where the head allows it, else 0.
        loss_chunk_tokens: Option<usize> = None,
    }

    /// `[local_sgd]`
    LocalSgdConfig {
        /// Steps between two averages of parameters and optimizer state over the replicas, which
        /// take local steps in between; `epoch` averages after each pass over the data. 0 disables
        /// local SGD: gradients are reduced in every step.
        sync_every: Interval = Interval::Steps(0),
        /// Replicas in all. A rank trains several of them in turn if it must; ranks that divide
        /// them into equal groups of a power of two give the same bits. Default: the replicas of
        /// the mesh.
        replicas: Option<usize> = None,
        /// Learning rate of the outer step, on the change of the averaged parameters; 1 without
        /// momentum takes the average.
        outer_lr: f64 = 1.0,
        /// Nesterov momentum of the outer step (`DiLoCo`).
        outer_momentum: f32 = 0.0,
    }

    /// `[offload]`, for GPUs.
    Offload {
        /// Keep fp32 master weights and optimizer state in host memory, and update them there.
        optimizer: bool = false,
        /// Keep parameters and reduced gradients in host memory; the parameters of each block are
        /// copied to the GPU for its turn. Requires `parallel.zero = 3` and `optimizer`.
        params: bool = false,
        /// Keep the inputs of blocks in host memory; each is copied back before its block's
        /// backward. Requires `parallel.recompute`.
        activations: bool = false,
    }

    /// `[parameter_server]`, for runs with `--servers`.
    ParameterServer {
        /// Cut of each unit into ranges, each of which one server holds: `fixed:2` (so many),
        /// `min:256KiB` (as many as servers, none smaller), or `max:64MiB` (as few as there can be,
        /// none larger).
        partition: Partition = Partition::Min(Size(256 << 10)),
        /// Steps that a worker may be ahead of the slowest: 0 (all take each step together, with
        /// the bits of data parallelism), a number, or `none`.
        staleness: Staleness = Staleness::Bound(0),
        /// Number format of parameters and gradients in messages: f32 or bf16.
        wire: WireFormat = WireFormat::F32,
        /// Connections of each worker to each server, among which ranges are dealt out: for
        /// networks on which one is not fast enough.
        connections: usize = 1,
        /// Learning rate of a gradient that is late: `none` leaves it, `inverse` divides it by one
        /// more than the updates in between.
        stale_lr: StaleRate = StaleRate::None,
        /// Batches of one lease, which a worker gets at a time.
        batches_per_lease: u64 = 64,
        /// Workers that the run is meant for: as many batches make a step; left out, those that are
        /// there at the start.
        workers: Option<usize> = None,
        /// Host, port, or both at which others reach coordinator and servers, such as `10.0.0.7`,
        /// `[2001:db8::7]:2222`, `:2222` or `node7:2222`. They listen at an IP address that is
        /// given here, else at that of `comm.interface`, else at the one that the host's name
        /// stands for. Omitted, the host's name (or the interface's address) and any port.
        address: Option<String> = None,
        /// Seconds after which a process that is not heard of counts as gone, and within which one
        /// that all need must come back.
        timeout: u64 = 60,
    }

    /// `[precision]`
    Precision {
        /// Number format of parameters, activations and GEMMs: f32, tf32 (f32 rounded for the
        /// tensor cores), bf16 (with f32 accumulation, master weights and optimizer state), or
        /// auto: bf16 on GPUs, f32 on CPUs. On CPUs that multiply bf16, only the operands of GEMMs
        /// have it.
        dtype: Compute = Compute::Auto,
    }

    /// `[device]`
    Device {
        /// Memory that ranks take of their GPU: a part of it for all that share it, or a size for
        /// each rank such as `40GiB`, taken at the start; or `grow`: blocks as they are needed, up
        /// to 0.9 of it.
        memory: DeviceMemory = DeviceMemory::Part(USUAL_PART),
        /// Most memory of a GPU that a rank takes, such as `16GiB`.
        memory_limit: Option<Size> = None,
        /// Ranks that may share one GPU, each with its part of the memory.
        ranks_per_gpu: usize = 1,
        /// Time the algorithms that cuBLASLt proposes for each GEMM before the first step, take the
        /// fastest, and keep the choice in `matmuls.json`; false takes the one it proposes first.
        matmul_autotune: bool = false,
    }

    /// `[checkpoint]`
    Checkpoint {
        /// Steps between checkpoints; 0 saves at the end only.
        every: u64 = 500,
        /// Epochs between checkpoints, in the place of `every`: with the step in which the last
        /// sample of an epoch is seen. 0 goes by steps.
        every_epochs: u64 = 0,
        /// Seconds after which a checkpoint is saved although `every` asks for none yet; 0 goes by
        /// steps alone.
        every_seconds: u64 = 0,
        /// Newest checkpoints kept.
        keep: usize = 2,
        /// Checkpoints of steps that are multiples of this are kept for ever; 0 keeps none for its
        /// step.
        keep_every: u64 = 0,
        /// Checkpoints with the lowest validation losses that are kept besides.
        keep_best: usize = 1,
        /// Write while training goes on: costs memory for a copy of the tensors that a rank saves.
        async_save: bool = true,
        /// Behaviour of a save while the one before is still being written: wait, or skip.
        if_busy: WhenBusy = WhenBusy::Wait,
        /// Seconds after the last good checkpoint for which a run continues and retries although
        /// files cannot be written; 0 ends it at once.
        io_retry_seconds: u64 = 1800,
    }

    /// `[eval]`
    Eval {
        /// Steps between evaluations; 0 evaluates at the end only.
        every: u64 = 250,
        /// Epochs between evaluations, in the place of `every`: after the step in which the last
        /// sample of an epoch is seen. 0 goes by steps.
        every_epochs: u64 = 0,
        /// Validation samples; left out, all.
        samples: Option<u64> = None,
        /// Samples computed at once; the same on any rank count, so that the loss is.
        batch: u64 = 16,
        /// Let the trainer evaluate; false leaves that to evaluators beside it.
        inline: bool = true,
        /// Evaluations in a row without a lower loss after which training ends; 0 trains to the
        /// end.
        patience: u64 = 0,
        /// Decrease that a loss must exceed to count as lower.
        min_delta: f64 = 0.0,
    }

    /// `[comm]`
    Comm {
        /// Algorithm of collectives: vendor (that of the MPI library or NCCL), ring,
        /// halving-doubling (Rabenseifner), hierarchical, reduce-to-one, or auto, which measures
        /// them at the start.
        algorithm: Choice = Choice::Auto,
        /// Let auto take only algorithms that add in the order of `halving-doubling`, so that the
        /// choice does not change the bits.
        deterministic: bool = true,
        /// Transport of GPU buffers: cuda-aware (MPI gets device pointers), host-staged (through
        /// pinned host memory), nccl (a GPU for every rank), or auto: nccl or cuda-aware, the
        /// faster of those that pass a probe at the start, else host-staged.
        transport: TransportChoice = TransportChoice::Auto,
        /// Seconds that a rank may wait for the others before the job says where each is and ends:
        /// more than the longest evaluation or checkpoint takes; 0 waits for ever.
        timeout: u64 = 600,
        /// Network interface at which the coordinator and the servers of a run listen: its name,
        /// such as `ib0`, or the network of its address, such as `10.1.0.0/16`. Omitted, the one
        /// that the host's name stands for. Ranks that MPI starts have the settings of the MPI
        /// library.
        interface: Option<String> = None,
        /// Encrypt the connections of a run with servers between hosts. Both ends prove in any case
        /// that they know the run's secret.
        encrypt: bool = true,
    }

    /// `[log]`
    Log {
        /// Least serious messages that are written: error, warn, info, debug, trace.
        level: Level = Level::Info,
        /// Steps between progress lines when the output is not a terminal.
        every: u64 = 50,
        /// A rank that computes so many times as long as the median rank, and 5 ms a step longer,
        /// is named in the log of rank 0; 0 names none.
        straggler_factor: f64 = 1.5,
        /// Steps over which ranks are compared.
        straggler_window: u64 = 20,
        /// Log which GPU each buffer, kernel and product goes to, every kind once.
        placement: bool = false,
        /// Tokens of text that the trained model generates at the end.
        sample_tokens: usize = 300,
        /// Write points for TensorBoard into `tensorboard/` of the run's directory.
        tensorboard: bool = false,
        /// With `tensorboard`: steps between two histograms of all weights and gradients; 0 writes
        /// none.
        histograms: u64 = 0,
    }
}

impl Data {
    /// Location of the data, for people.
    pub fn told(&self) -> String {
        let mixed = |one: &Mix| format!("{} × {}", one.weight, one.path);
        match &self.mix[..] {
            [] => self.path.clone(),
            mix => mix.iter().map(mixed).collect::<Vec<_>>().join(" + "),
        }
    }
}

impl Model {
    /// The section of a network of a program's own, with the keys by which its data is read.
    pub fn of_own(network: CustomModel) -> Self {
        let of_rows = |input: Vec<usize>| Self {
            kind: ModelKind::Layers,
            input: Some(input),
            ..Self::default()
        };
        let section = match network.input() {
            Some(Input::Text { context, vocabulary }) => {
                Self { context: *context, vocabulary: Some(*vocabulary), ..Self::default() }
            }
            Some(Input::Numbers(shape)) => of_rows(shape.clone()),
            Some(Input::Ids { count, .. }) => of_rows(vec![*count]),
            None => Self::default(),
        };
        Self { own: Some(network), ..section }
    }
}

impl Config {
    /// Whether it asks for something that only GPUs can do.
    pub fn needs_gpu(&self) -> bool {
        let Offload { optimizer, params, activations } = self.offload;
        let offloads = optimizer || params || activations;
        self.precision.dtype.needs_gpu()
            || offloads
            || self.model.place.tables == EmbeddingPlacement::Host
    }
}

/// `parallel.layout`
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LayoutMode {
    /// The keys of `[parallel]`.
    Given,
    /// The fastest that fits.
    Auto,
}

/// Families of networks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ModelKind {
    /// GPT-2.
    Gpt,
    /// Llama.
    Llama,
    /// Layers, one after the other.
    Layers,
}

/// Scaling of the frequencies of rotary positions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RopeType {
    /// None.
    Default,
    /// All are divided.
    Linear,
    /// Low ones are divided.
    Llama3,
}

impl RopeType {
    /// Returns the name of the type here and in Hugging Face's files.
    pub fn name(self) -> &'static str {
        match self {
            Self::Default => "default",
            Self::Linear => "linear",
            Self::Llama3 => "llama3",
        }
    }
}

/// Memory of embedding tables.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EmbeddingPlacement {
    /// That of the device that computes.
    Device,
    /// The host's, which also looks rows up and updates them.
    Host,
}

/// Number of blocks, or list of layers.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(untagged)]
pub enum LayerList {
    /// So many transformer blocks.
    Count(usize),
    /// The layers of the list.
    List(Vec<Layer>),
}

impl<'de> Deserialize<'de> for LayerList {
    /// By hand: a mistake in a list is to be told with the layer's number.
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Either;
        impl<'de> Visitor<'de> for Either {
            type Value = LayerList;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a number of blocks or a list of layers")
            }

            fn visit_u64<E: Error>(self, count: u64) -> Result<LayerList, E> {
                Ok(LayerList::Count(count as usize))
            }

            fn visit_i64<E: Error>(self, count: i64) -> Result<LayerList, E> {
                let wrong = || E::invalid_value(Unexpected::Signed(count), &self);
                count.try_into().map(LayerList::Count).map_err(|_| wrong())
            }

            fn visit_seq<S: SeqAccess<'de>>(self, mut items: S) -> Result<LayerList, S::Error> {
                let mut layers = Vec::new();
                loop {
                    let next = items.next_element();
                    match next.map_err(|e| {
                        S::Error::custom(format!("layer {} of the list: {e}", layers.len()))
                    })? {
                        Some(layer) => layers.push(layer),
                        None => return Ok(LayerList::List(layers)),
                    }
                }
            }
        }
        deserializer.deserialize_any(Either)
    }
}

/// The loss that a network minimises.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LossKind {
    /// Softmax cross-entropy of classes.
    CrossEntropy,
    /// Mean of squares.
    Mse,
    /// Mean of absolute values.
    Mae,
    /// Mean of squares near the target, of absolute values far from it.
    Huber,
    /// Of logits and numbers between 0 and 1.
    BinaryCrossEntropy,
}

/// Update rules.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OptimizerKind {
    /// Adam with decoupled weight decay.
    Adamw,
    /// Stochastic gradient descent with momentum.
    Sgd,
    /// Adam, its weight decay added to the gradient.
    Adam,
    /// Adagrad.
    Adagrad,
    /// RMSProp with momentum.
    Rmsprop,
    /// AdamW, the step of each matrix scaled to its norm.
    Lamb,
    /// Stochastic gradient descent with momentum, the gradient of each matrix scaled to its norm.
    Lars,
    /// Lion, with decoupled weight decay.
    Lion,
}

/// Scaling of the learning rate with the batch size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Scaling {
    /// In proportion (Goyal et al., 2017).
    Linear,
    /// With its square root (Krizhevsky, 2014).
    Sqrt,
}

/// Behaviour of a save while another is under way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WhenBusy {
    /// It waits for the other's end.
    Wait,
    /// It is left out.
    Skip,
}

/// Number formats of messages to and from servers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WireFormat {
    /// 32 bits.
    F32,
    /// 16 bits, of which 8 are the exponent.
    Bf16,
}

/// Learning rate of a gradient that is late.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum StaleRate {
    /// As of any other.
    None,
    /// Divided by one more than the updates in between.
    Inverse,
}

/// Number formats of matrix products.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Compute {
    /// The device's preferred format: bf16 on GPUs, f32 on CPUs.
    Auto,
    /// IEEE single precision.
    F32,
    /// The same, with operands of products rounded to 10 bits.
    Tf32,
    /// Its upper half, with sums, masters and optimizer in f32.
    Bf16,
}

impl Compute {
    /// Whether only GPUs support it.
    pub fn needs_gpu(self) -> bool {
        self == Compute::Tf32
    }

    /// Bytes of a parameter or activation, on the host or on a GPU.
    pub fn size(self, on_host: bool) -> usize {
        if self == Compute::Bf16 && !on_host { 2 } else { 4 }
    }
}

/// Seriousness of log messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// Only errors.
    Error,
    /// And warnings.
    Warn,
    /// And the course of the run.
    Info,
    /// And details.
    Debug,
    /// And everything.
    Trace,
}

impl From<Level> for log::LevelFilter {
    fn from(level: Level) -> Self {
        match level {
            Level::Error => Self::Error,
            Level::Warn => Self::Warn,
            Level::Info => Self::Info,
            Level::Debug => Self::Debug,
            Level::Trace => Self::Trace,
        }
    }
}
