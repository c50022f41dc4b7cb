//! Convolution.

use super::Cuda;
use crate::backend::ConvolutionOps;

impl ConvolutionOps for Cuda {}
