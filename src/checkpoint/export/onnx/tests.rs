//! The structure of graphs: files are parsed, and every name, shape and type in them is checked.

use std::collections::BTreeSet;

use super::protocol::{DimensionExtent, INT64, NodeProto};
use super::*;
use hpctrain_config as config;
use hpctrain_config::ModelKind;
use hpctrain_nn::layers::Layer;

/// Returns the model of a TOML list of layers.
fn model(input: &[usize], layers: &str) -> Model {
    #[derive(serde::Deserialize)]
    struct List {
        layers: Vec<Layer>,
    }
    let list: List = toml::from_str(&format!("layers = [{layers}]")).unwrap();
    Model {
        kind: ModelKind::Layers,
        input: Some(input.to_vec()),
        layers: LayerList::List(list.layers),
        ..Model::default()
    }
}

/// Writes the graph of a model with weights of zero, checks and returns it.
fn graph_of(model: &Model, loss: LossKind, scale: Option<&Scale>) -> GraphProto {
    let network = config::network(&mut model.clone(), None).unwrap();
    let graph = network_graph(model, loss, scale).unwrap();
    let all = ExportedTensor::all(&network, tensors(&network));
    let used: BTreeSet<&String> = graph.weights.iter().collect();
    assert_eq!(used.len(), graph.weights.len());
    assert_eq!(used, all.iter().map(|tensor| &tensor.name).collect());
    let zeros = |tensor: &ExportedTensor| TensorProto {
        raw_data: vec![0; tensor.len() * size_of::<f32>()],
        ..initializer(tensor)
    };
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(GRAPH);
    write_graph(&path, graph, all.iter().map(zeros).collect(), vec![entry("step", "1".into())])
        .unwrap();
    let file = ModelProto::decode(&std::fs::read(&path).unwrap()[..]).unwrap();
    assert_eq!(file.ir_version, 8);
    assert_eq!(file.opset_import, [OperatorSetIdProto { domain: String::new(), version: 17 }]);
    assert_eq!(file.metadata_props, [entry("step", "1".into())]);
    let graph = file.graph.unwrap();
    check(&graph);
    graph
}

/// Checks that names are defined once and before they are used, that constants are as long as their
/// shapes say, and that inputs and outputs have a free batch size.
fn check(graph: &GraphProto) {
    let mut defined = BTreeSet::new();
    for name in graph.input.iter().map(|input| &input.name) {
        assert!(defined.insert(name), "{name} is defined twice");
    }
    for constant in &graph.initializer {
        assert!(defined.insert(&constant.name), "{} is defined twice", constant.name);
        let width = if constant.data_type == INT64 { 8 } else { 4 };
        let elements: i64 = constant.dims.iter().product();
        assert_eq!(constant.raw_data.len() as i64, elements * width, "{}", constant.name);
    }
    let mut used = BTreeSet::new();
    for NodeProto { input, output, name, op_type, .. } in &graph.node {
        for argument in input {
            assert!(defined.contains(argument), "{name} ({op_type}) uses {argument}");
            used.insert(argument);
        }
        for result in output {
            assert!(defined.insert(result), "{result} is defined twice");
        }
    }
    for constant in &graph.initializer {
        assert!(used.contains(&constant.name), "{} is not used", constant.name);
    }
    for value in &graph.output {
        assert!(defined.contains(&value.name), "{} is not computed", value.name);
    }
    for value in graph.input.iter().chain(&graph.output) {
        let of_type = value.r#type.as_ref().unwrap().tensor_type.as_ref().unwrap();
        let first = of_type.shape.as_ref().unwrap().dim[0].extent.as_ref().unwrap();
        assert_eq!(*first, DimensionExtent::Param("batch".into()), "{}", value.name);
    }
}

/// Returns the operations in order.
fn operations(graph: &GraphProto) -> Vec<&str> {
    graph.node.iter().map(|node| &node.op_type[..]).collect()
}

/// Returns the names and shapes of inputs, and of outputs.
fn ends(graph: &GraphProto) -> [Vec<String>; 2] {
    [&graph.input, &graph.output].map(|values| values.iter().map(describe).collect())
}

/// Returns the shape of a tensor.
fn dims_of<'a>(graph: &'a GraphProto, name: &str) -> &'a [i64] {
    &graph.initializer.iter().find(|constant| constant.name == name).unwrap().dims
}

#[test]
fn images_are_transposed_at_the_ends_of_a_convolutional_network() {
    let layers = "{kind='conv2d', filters=4, kernel=[3, 2], padding='same', groups=2}, \
                  {kind='batch_norm'}, {kind='relu'}, {kind='max_pool2d', kernel=2, padding=1}, \
                  {kind='residual', layers=[{kind='conv2d', filters=4, kernel=1}, {kind='gelu'}]}, \
                  {kind='residual', layers=[{kind='conv2d', filters=6, kernel=1}], \
                  shortcut=[{kind='conv2d', filters=6, kernel=1, bias=false}]}, \
                  {kind='group_norm', groups=3}, {kind='avg_pool2d', kernel=2, stride=1}, \
                  {kind='dropout', rate=0.5}, {kind='flatten'}, {kind='dense', units=5}";
    let graph = graph_of(&model(&[7, 6, 2], layers), LossKind::CrossEntropy, None);
    let transposes = operations(&graph).iter().filter(|op| **op == "Transpose").count();
    assert_eq!(transposes, 2, "{:?}", operations(&graph));
    assert_eq!(dims_of(&graph, "layers.0.weight"), [4, 1, 3, 2]);
    assert_eq!(dims_of(&graph, "layers.5.shortcut.0.weight"), [6, 4, 1, 1]);
    let [inputs, outputs] = ends(&graph);
    assert_eq!(inputs, ["features [batch, 7, 6, 2]"]);
    assert_eq!(outputs, ["outputs [batch, 5]", "probabilities [batch, 5]"]);
}

#[test]
fn recommenders_take_an_id_for_each_category() {
    let layers = "{kind='embedding_tables', ids=[5, 3, 4], width=2, dense=[{kind='dense', \
                  units=2}, {kind='silu'}]}, {kind='dot_interaction'}, {kind='dense', units=1}";
    let graph = graph_of(&model(&[7], layers), LossKind::BinaryCrossEntropy, None);
    let [inputs, outputs] = ends(&graph);
    assert_eq!(inputs, ["features [batch, 7]", "ids [batch, 3]"]);
    assert_eq!(outputs, ["outputs [batch, 1]", "probabilities [batch, 1]"]);
    assert_eq!(dims_of(&graph, "layers.0.tables.2.weight"), [4, 2]);
    // Without numbers.
    let layers = "{kind='embedding_tables', ids=[5, 3], width=2}, {kind='flatten'}, {kind='dense', \
                  units=1}";
    let graph = graph_of(&model(&[0], layers), LossKind::Mse, None);
    assert_eq!(ends(&graph), [["ids [batch, 2]"], ["outputs [batch, 1]"]]);
}

#[test]
fn layers_on_several_axes_keep_them() {
    let layers = "{kind='embedding', ids=9, width=4}, {kind='layer_norm'}, {kind='dense', \
                  units=6}, {kind='batch_norm'}, {kind='tanh'}, {kind='group_norm', groups=2}, \
                  {kind='softmax'}, {kind='sigmoid'}, {kind='leaky_relu', slope=0.2}, \
                  {kind='reshape', shape=[2, 3, 5]}, {kind='global_avg_pool'}, {kind='flatten'}, \
                  {kind='dense', units=3, bias=false}";
    let graph = graph_of(&model(&[5], layers), LossKind::Huber, None);
    assert_eq!(ends(&graph), [["ids [batch, 5]"], ["outputs [batch, 3]"]]);
    let matmul = operations(&graph).iter().position(|op| *op == "MatMul").unwrap();
    assert_eq!(operations(&graph)[matmul - 1..matmul + 2], ["Transpose", "MatMul", "Add"]);
    // A network that ends with several axes has rows of outputs.
    let graph = graph_of(&model(&[2, 3], "{kind='dense', units=4}"), LossKind::Mse, None);
    assert_eq!(ends(&graph), [["features [batch, 2, 3]"], ["outputs [batch, 8]"]]);
}

#[test]
fn features_are_normalized_as_in_training() {
    let model = model(&[2, 2, 3], "{kind='flatten'}, {kind='dense', units=1}");
    let graph = |mean: &[f32], std: &[f32]| {
        let scale = Scale { mean: mean.to_vec(), std: std.to_vec() };
        network_graph(&model, LossKind::Mse, Some(&scale))
    };
    // One number, one for each channel, one for each column and channel.
    let shapes = [(1, &[][..]), (3, &[3]), (6, &[2, 2, 3]), (12, &[2, 2, 3])];
    for (count, wanted) in shapes {
        let mean: Vec<f32> = (1..=count).map(|x| x as f32).collect();
        let std = vec![2.0; count];
        let graph = graph(&mean, &std).unwrap();
        let ops: Vec<&str> = graph.nodes[..2].iter().map(|node| &node.op_type[..]).collect();
        assert_eq!(ops, ["Sub", "Div"]);
        assert_eq!(graph.constants[0].dims, dims(wanted));
        let first: Vec<f32> = bytemuck::pod_collect_to_vec(&graph.constants[0].raw_data);
        assert!(first.iter().eq(mean.iter().cycle().take(first.len())), "{first:?}");
    }
    // Bytes are only divided.
    let bytes = graph(&[0.0], &[255.0]).unwrap();
    assert_eq!(bytes.nodes[0].op_type, "Div");
    for (mean, std) in [(vec![0.0; 5], vec![1.0; 5]), (vec![0.0; 3], vec![1.0]), (vec![], vec![])] {
        let error = graph(&mean, &std).err().unwrap();
        assert!(error.to_string().contains("for inputs of 2 × 2 × 3"), "{error}");
    }
}

#[test]
fn one_scale_at_most_is_in_a_graph() {
    let scaled = |mean| Some(Scale { mean: vec![mean], std: vec![1.0] });
    let preprocessing = |scales| Preprocessing { scales, ..Preprocessing::default() };
    assert_eq!(scale(None).unwrap(), None);
    assert_eq!(scale(Some(&preprocessing(vec![None]))).unwrap(), None);
    let one = preprocessing(vec![scaled(3.0)]);
    assert_eq!(scale(Some(&one)).unwrap().unwrap().mean, [3.0]);
    let error = scale(Some(&preprocessing(vec![scaled(3.0), None]))).unwrap_err().to_string();
    assert!(error.contains("2 scales of inputs"), "{error}");
}
