//! Convolution.

use super::Cuda;
use hpctrain_device::ConvolutionOps;

impl ConvolutionOps for Cuda {}
