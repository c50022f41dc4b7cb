//! The operations that a autograd tape records.

use hpctrain_device::{Activation, Attention, Dropout, RegressionLoss};

/// The class that each row of logits should have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Targets {
    /// The class of the row's sample.
    Classes,
    /// The row's own number: each row belongs to the column of the same number, as the similarities
    /// of a batch of pairs do.
    Diagonal,
}

/// An operation, with what its backward needs to know besides tensors.
#[derive(Debug, Clone, Copy)]
pub enum Operation {
    /// x·Wᵀ + b; the bias is the third input, if there is one.
    Linear,
    /// a·bᵀ.
    MatmulTransposed,
    /// a + b.
    Add,
    /// a·b, elementwise.
    Multiply,
    /// An elementwise function.
    Function(Activation),
    /// The softmax of rows.
    Softmax,
    /// Layer or RMS normalisation; the weight and the bias are the further inputs. Without a weight
    /// each row is scaled to length 1.
    Norm { epsilon: f32, centred: bool },
    /// A mask.
    Dropout(Dropout),
    /// Causal attention of packed queries, keys and values.
    Attention(Attention),
    /// silu(gate)·up.
    Swiglu,
    /// Columns from this one on.
    Columns(usize),
    /// Inputs side by side.
    Concatenate,
    /// The sum of each row.
    SumColumns,
    /// A column, repeated.
    Broadcast,
    /// Rows of tables by the ids of the micro-batch; the second input is the table of positions, if
    /// there is one.
    Embedding,
    /// The cross-entropy of each row.
    CrossEntropy { targets: Targets, smoothing: f32 },
    /// The supervised contrastive loss of each row of similarities.
    Contrastive,
    /// Whether the target of each row is among its largest logits; it has no gradient.
    Hits,
    /// The mean deviation of each row from the values of the samples.
    Regression(RegressionLoss),
}
