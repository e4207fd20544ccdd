//! The ResNet family matches torchvision: names, shapes, order, initial weights, outputs and gradients.

use drumline_torch::{buffers, grad, parameters};
use drumline_zoo::models::{ModelOptions, build, names};
use rank_test::ranks_test;
use tch::nn::{ModuleT, VarStore};
use tch::{Device, Kind, Tensor, no_grad};

use super::golden::{assert_close, brief, fill, floats, json, strings};

fn depth(arch: &str) -> String {
    let start = arch.trim_start_matches("wide_").split('_').next().unwrap();
    start.chars().filter(char::is_ascii_digit).collect()
}

#[test]
fn names_shapes_and_order_are_torchvisions() {
    let golden = json("resnet_names.json");
    let arches: Vec<_> = names().filter(|name| golden["shapes"].get(name).is_some()).collect();
    assert_eq!(arches.len(), 10);
    for arch in arches {
        let store = VarStore::new(Device::Cpu);
        build(arch, &store.root(), &ModelOptions::default()).unwrap();
        let expected = strings(&golden["names"][depth(arch)]);
        let shapes = strings(&golden["shapes"][arch]);
        let variables = store.variables();
        assert_eq!(variables.len(), expected.len(), "{arch}");
        for (name, shape) in expected.iter().zip(&shapes) {
            let size = variables.get(name).unwrap_or_else(|| panic!("{arch} has no {name}")).size();
            let size: Vec<_> = size.iter().map(i64::to_string).collect();
            assert_eq!(&size.join("x"), shape, "{arch} {name}");
        }
        let trained = expected.iter().filter(|name| !name.contains("running") && !name.contains("tracked"));
        let created: Vec<_> = parameters(&store).into_iter().map(|named| named.name).collect();
        assert_eq!(created, trained.cloned().collect::<Vec<_>>(), "{arch}");
    }
}

// Runs in its own process, because the random generator is global.
ranks_test!(weights_after_a_seed_are_torchvisions, 1, {
    let golden = json("resnet_names.json");
    for arch in ["resnet18", "resnet50"] {
        tch::manual_seed(7);
        let store = VarStore::new(Device::Cpu);
        build(arch, &store.root(), &ModelOptions { num_classes: 10, ..Default::default() }).unwrap();
        let variables = store.variables();
        for (name, expected) in golden["seeded"][arch].as_object().unwrap() {
            assert_close(&format!("{arch} {name}"), &brief(&variables[name]), &floats(expected), 1e-6);
        }
    }
});

fn fill_model(store: &VarStore, names: &[String]) {
    let variables = store.variables();
    for (index, name) in (0u32..).zip(names) {
        let mut tensor = variables[name].shallow_clone();
        let size = tensor.size();
        let x = fill(index, &size);
        let x = if name.ends_with("num_batches_tracked") {
            continue;
        } else if size.len() > 1 {
            x * (24.0 / (tensor.numel() as f64 / size[1] as f64)).sqrt()
        } else if name.ends_with("running_var") || (name.ends_with("weight") && !name.contains("fc")) {
            x * 0.4 + 1.0
        } else {
            x * 0.2
        };
        no_grad(|| tensor.copy_(&x));
    }
}

fn numbers(tensor: &Tensor) -> Vec<f64> {
    Vec::try_from(tensor.narrow(0, 0, 2).to_kind(Kind::Double).flatten(0, -1)).unwrap()
}

#[test]
fn a_training_step_of_resnet18_is_torchvisions() {
    tch::set_num_threads(1);
    let golden = json("resnet_names.json");
    let step = &golden["step"];
    let store = VarStore::new(Device::Cpu);
    let model =
        build("resnet18", &store.root(), &ModelOptions { num_classes: 10, ..Default::default() }).unwrap();
    fill_model(&store, &strings(&golden["names"]["18"]));
    let images = (fill(1000, &[16, 3, 32, 32]) * 4.0).to_kind(Kind::Float);
    let labels = Tensor::arange(16, (Kind::Int64, Device::Cpu)).remainder(10);

    let evaluated = no_grad(|| model.forward_t(&images, false));
    assert_close("eval output", &numbers(&evaluated), &floats(&step["eval_output"]), 1e-4);
    let output = model.forward_t(&images, true);
    assert_close("output", &numbers(&output), &floats(&step["output"]), 1e-4);
    let loss = output.cross_entropy_for_logits(&labels);
    assert_close("loss", &[loss.double_value(&[])], &[step["loss"].as_f64().unwrap()], 1e-4);
    loss.backward();

    for named in parameters(&store) {
        let gradient = grad(&named.tensor).unwrap().expect("every parameter is used");
        assert_close(&named.name, &brief(&gradient), &floats(&step["gradients"][&named.name]), 1e-4);
    }
    for named in buffers(&store) {
        if named.name.ends_with("num_batches_tracked") {
            assert_eq!(Some(named.tensor.int64_value(&[])), step["tracked"].as_i64())
        } else {
            assert_close(&named.name, &brief(&named.tensor), &floats(&step["buffers"][&named.name]), 1e-4)
        }
    }
}
