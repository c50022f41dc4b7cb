//! The tensors of a custom network, which servers hold without the code of its blocks.

use serde::{Deserialize, Serialize};

use hpctrain_base::error::{Error, Result};
use hpctrain_base::layout::Tensor;
use hpctrain_cpu::Cpu;
use hpctrain_device::Kernels;
use hpctrain_nn::{Block, Blocks, Context, CustomModel, Grads, Input, ModelBuilder, Params};

/// The name of the network whose blocks are the tensors of custom functions, one each.
const TENSORS: &str = "parameters";

/// The name, the samples and the tensors of a custom network.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct NetworkSpec {
    name: String,
    input: Input,
    outputs: usize,
    units: Vec<UnitSpec>,
}

/// The tensors of a block.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct UnitSpec {
    name: String,
    tensors: Vec<Tensor>,
}

impl NetworkSpec {
    /// Returns the specification of a custom network, or none if the network was only read from a
    /// file and has no builder in this program.
    pub fn from_network(network: &CustomModel) -> Option<Self> {
        let blocks = network.blocks::<Cpu>();
        let units = blocks
            .iter()
            .map(|block| UnitSpec { name: block.name(), tensors: block.tensors() })
            .collect();
        Some(Self {
            name: network.name().into(),
            input: network.input()?.clone(),
            outputs: network.outputs(),
            units,
        })
    }

    /// Creates the specification of tensors without a network, each of which is one unit.
    pub fn from_tensors(tensors: Vec<Tensor>) -> Self {
        let units = tensors
            .into_iter()
            .map(|tensor| UnitSpec { name: tensor.name.clone(), tensors: vec![tensor] })
            .collect();
        // No sample is read. Two outputs suit any loss.
        Self { name: TENSORS.into(), input: Input::Numbers(vec![1]), outputs: 2, units }
    }

    /// Returns a network with these tensors, which cannot compute.
    pub fn model(&self) -> CustomModel {
        CustomModel::new(self.clone())
    }

    /// Checks that this process's program defines the network of a run, of which `run` is the
    /// specification if it is a custom one.
    ///
    /// # Errors
    /// Returns an error if it does not; it names both networks.
    pub fn check(run: Option<&Self>, program: Option<&CustomModel>) -> Result<()> {
        const HINT: &str = "start all processes of a run with the same program";
        let message = match (run, program.and_then(Self::from_network)) {
            (None, None) => return Ok(()),
            (Some(run), Some(own)) if *run == own => return Ok(()),
            (Some(run), Some(own)) if run.name == own.name => format!(
                "the custom network {:?} of this program has other blocks or tensors than that of \
                 the run",
                run.name
            ),
            (Some(run), Some(own)) => format!(
                "the run trains the custom network {:?}, but this program defines {:?}",
                run.name, own.name
            ),
            (Some(run), None) => format!(
                "the run trains the custom network {:?}, but this program defines none",
                run.name
            ),
            (None, Some(own)) => format!(
                "the run trains the model of its configuration, but this program defines the \
                 custom network {:?}",
                own.name
            ),
        };
        Err(Error::input(message).hint(HINT))
    }
}

impl ModelBuilder for NetworkSpec {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn input(&self) -> Input {
        self.input.clone()
    }

    fn outputs(&self) -> usize {
        self.outputs
    }

    fn blocks<B: Kernels>(&self) -> Blocks<B> {
        self.units.iter().map(|unit| Box::new(unit.clone()) as Box<dyn Block<B>>).collect()
    }
}

impl UnitSpec {
    fn computes_nothing(&self) -> Error {
        Error::internal(format!("the block {} only has tensors and cannot compute", self.name))
    }
}

impl<B: Kernels> Block<B> for UnitSpec {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn tensors(&self) -> Vec<Tensor> {
        self.tensors.clone()
    }

    fn input_per_row(&self) -> usize {
        1
    }

    fn saved_elems_per_row(&self) -> usize {
        0
    }

    fn saved_f32_per_row(&self) -> usize {
        0
    }

    fn scratch_per_row(&self) -> usize {
        0
    }

    fn forward(
        &self,
        _: &Context<'_, B>,
        _: Params<'_, B>,
        _: &B::Buf,
    ) -> Result<(B::Buf, Vec<B::Buf>)> {
        Err(self.computes_nothing())
    }

    fn backward(
        &self,
        _: &Context<'_, B>,
        _: Params<'_, B>,
        _: Grads<'_, B>,
        _: &B::Buf,
        _: Vec<B::Buf>,
        _: B::Buf,
    ) -> Result<B::Buf> {
        Err(self.computes_nothing())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hpctrain_base::layout::Init;

    fn network(name: &str, width: usize) -> NetworkSpec {
        let spec = NetworkSpec::from_tensors(vec![Tensor::new("w", &[width, 2], Init::Zeros)]);
        NetworkSpec { name: name.into(), ..spec }
    }

    #[test]
    fn other_networks_are_refused_with_both_names() {
        let run = network("wide", 4);
        let read: NetworkSpec =
            serde_json::from_str(&serde_json::to_string(&run).unwrap()).unwrap();
        assert_eq!(read, run);
        let check = |run: Option<&NetworkSpec>, own: Option<NetworkSpec>| {
            let own = own.map(|own| own.model());
            NetworkSpec::check(run, own.as_ref()).map_err(|e| e.to_string())
        };
        assert_eq!(check(Some(&run), Some(network("wide", 4))), Ok(()));
        assert_eq!(check(None, None), Ok(()));
        let error = check(Some(&run), Some(network("deep", 4))).unwrap_err();
        assert!(error.contains("trains the custom network \"wide\""), "{error}");
        assert!(error.contains("this program defines \"deep\"\nhint: start all"), "{error}");
        let error = check(Some(&run), Some(network("wide", 5))).unwrap_err();
        assert!(error.contains("\"wide\" of this program has other blocks"), "{error}");
        assert!(check(Some(&run), None).unwrap_err().contains("\"wide\", but this program"));
        assert!(check(None, Some(run)).unwrap_err().contains("the custom network \"wide\""));
    }
}
