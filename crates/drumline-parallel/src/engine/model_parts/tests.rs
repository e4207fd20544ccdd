//! Parts of tensors: where they lie in the whole, and what is refused.

use super::*;
use drumline_comm::{CommError, LocalGroup};
use drumline_torch::{Adam, AdamOptions, Lamb, LambOptions};

/// Rank `rank` of 2 has the same half of two tensors of 4 rows, one after the other, and the rows `rows` of these.
fn placed(rank: i64, rows: std::ops::Range<i64>) -> (Part, Placed) {
    let whole = Whole { name: "w".into(), size: vec![8, 3] };
    let part = Part { whole, offsets: vec![2 * rank, 0], stack: Some(Stack { dim: 0, count: 2 }) };
    let size = [rows.end - rows.start, 3];
    let tensor = Tensor::zeros(size, (Kind::Float, Device::Cpu));
    let placed = Placed::replicated(Named { name: "w".into(), tensor }, true);
    (part, Placed { offsets: vec![rows.start, 0], whole: vec![4, 3], ..placed })
}

#[test]
fn rows_of_a_stacked_part_lie_in_several_places_of_the_whole() {
    let found = LocalGroup::run(2, |group| {
        let shape = MeshShape::default().with(Axis::Tp, 2);
        let (mesh, rank) = (Mesh::new(&group, shape)?, group.rank() as i64);
        let store = VarStore::new(Device::Cpu);
        let _ = store.root().zeros("w", &[4, 3]);
        let meet = |parts: &[Part]| {
            ModelParts::meet(&store, &mesh, parts)
                .map_err(|error| CommError::Init { cause: error.to_string() })
        };
        let parts = meet(&[placed(rank, 0..4).0])?;
        let places = [0..4, 1..3, 0..1, 3..3].map(|rows| {
            let placed = parts.placed(vec![placed(rank, rows).1]).remove(0);
            assert_eq!(placed.whole, [8, 3]);
            let place = |boxed: PlacedBox| (boxed.at[0], boxed.offsets[0], boxed.size[0]);
            placed.boxes().into_iter().map(place).collect::<Vec<_>>()
        });
        Ok(places)
    });
    let [first, second] = found.unwrap().try_into().unwrap();
    assert_eq!(first[..3], [vec![(0, 0, 2), (2, 4, 2)], vec![(0, 1, 1), (1, 4, 1)], vec![(0, 0, 1)]]);
    assert_eq!(second[..3], [vec![(0, 2, 2), (2, 6, 2)], vec![(0, 3, 1), (1, 6, 1)], vec![(0, 2, 1)]]);
    assert!(first[3].iter().chain(&second[3]).all(|(_, _, len)| *len == 0), "a rank without rows");
}

#[test]
fn parts_that_overlap_or_leave_gaps_are_refused() {
    let refused = |offsets: [i64; 2]| {
        let said = LocalGroup::run(2, |group| {
            let mesh = Mesh::new(&group, MeshShape::default().with(Axis::Tp, 2))?;
            let store = VarStore::new(Device::Cpu);
            let _ = store.root().zeros("w", &[2]);
            let whole = Whole { name: "w".into(), size: vec![4] };
            let part = Part { whole, offsets: vec![offsets[group.rank()]], stack: None };
            Ok(ModelParts::meet(&store, &mesh, &[part]).map(drop).map_err(|error| error.to_string()))
        });
        let mut said = said.unwrap();
        assert_eq!(said[0], said[1]);
        said.remove(0)
    };
    assert_eq!(refused([0, 2]), Ok(()));
    assert!(refused([0, 1]).unwrap_err().contains("[2] at [1] beside [2] at [0]"));
    assert!(refused([0, 0]).unwrap_err().contains("parts that cover the whole, which has size [4]"));
    assert!(refused([0, 3]).unwrap_err().contains("inside of the whole, which has size [4]"));
}

/// What the engine answers to `Lamb` and to `Adam` on each of two ranks.
fn refused(
    shape: MeshShape,
    name_and_part: impl Fn(usize) -> (&'static str, Vec<Part>) + Sync,
) -> Vec<[String; 2]> {
    let said = LocalGroup::run(2, |group| {
        let (mesh, store) = (Mesh::new(&group, shape)?, VarStore::new(Device::Cpu));
        let (name, parts) = name_and_part(group.rank());
        let _ = store.root().zeros(name, &[2, 3]);
        let failed = |cause: String| CommError::Init { cause };
        let parts = ModelParts::meet(&store, &mesh, &parts).map_err(|error| failed(error.to_string()))?;
        let own = parameters(&store);
        let lamb =
            Lamb::new(own.clone(), LambOptions::default()).map_err(|error| failed(error.to_string()))?;
        let adam = Adam::new(own, AdamOptions::default()).map_err(|error| failed(error.to_string()))?;
        let said = |optimizer: &dyn Optimizer| match parts.check_optimizer(optimizer) {
            Ok(()) => String::new(),
            Err(error) => error.to_string(),
        };
        Ok([said(&lamb), said(&adam)])
    });
    said.unwrap()
}

#[test]
fn optimizers_that_need_whole_tensors_are_refused_only_where_a_tensor_is_cut() {
    let stages =
        refused(MeshShape::default().with(Axis::Pp, 2), |rank| (["first", "last"][rank], Vec::new()));
    assert_eq!(stages, [[String::new(), String::new()], [String::new(), String::new()]]);
    let halves = refused(MeshShape::default().with(Axis::Tp, 2), |rank| {
        let whole = Whole { name: "w".into(), size: vec![4, 3] };
        ("w", vec![Part { whole, offsets: vec![2 * rank as i64, 0], stack: None }])
    });
    for [lamb, adam] in halves {
        assert!(lamb.contains("needs whole parameters, and ranks along tp have parts; try Adam"), "{lamb}");
        assert_eq!(adam, "");
    }
}
