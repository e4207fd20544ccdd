//! Groups along the axes of a mesh, in real processes.

use std::time::Duration;

use drumline_comm::{Axis, GroupOptions, LocalGroup, Mesh, MeshShape, ProcessGroup, ReduceOp};
use rank_test::anyhow::{Result, ensure};
use rank_test::ranks_test;

/// Checks the sum of the ranks along these axes against the arithmetic.
fn sums(mesh: &Mesh, axes: &[Axis], group: &ProcessGroup) -> Result<()> {
    let me = mesh.whole().rank();
    let peers = mesh.shape().peers(me, axes);
    ensure!(group.members() == peers, "{axes:?}: {:?}, expected {peers:?}", group.members());
    let mut sum = [me as u64];
    group.all_reduce(&mut sum, ReduceOp::Sum)?;
    ensure!(sum == [peers.iter().sum::<usize>() as u64], "{axes:?}: {sum:?}");
    Ok(())
}

ranks_test!(a_mesh_has_groups_along_its_axes, 8, {
    let group = ProcessGroup::from_env()?;
    let shapes = [
        MeshShape::default().with(Axis::Pp, 2).with(Axis::Dp, 2).with(Axis::Tp, 2),
        MeshShape::default().with(Axis::Dp, 2).with(Axis::Shard, 4),
        MeshShape::default().with(Axis::Shard, 2).with(Axis::Cp, 2).with(Axis::Tp, 2),
        MeshShape::default().with(Axis::Dp, 8),
    ];
    for shape in shapes {
        let mesh = Mesh::new(&group, shape)?;
        for axis in Axis::ALL {
            sums(&mesh, &[axis], mesh.axis(axis))?;
        }
        sums(&mesh, &[Axis::Dp, Axis::Shard], mesh.samples())?;
        sums(&mesh, &[Axis::Dp, Axis::Shard, Axis::Cp], mesh.losses())?;
        sums(&mesh, &Axis::ALL, mesh.whole())?;
    }
});

#[test]
fn a_shape_that_does_not_fit_leaves_the_group_usable() {
    let outcome = LocalGroup::run(6, |group| {
        let error = Mesh::new(&group, MeshShape::default().with(Axis::Tp, 4)).unwrap_err();
        assert!(error.to_string().contains("its divisors are 1, 2, 3, 6"), "{error}");
        // The group can still be used.
        Mesh::along(&group, Axis::Dp)?.whole().barrier()
    });
    outcome.unwrap();
}

#[test]
fn errors_name_ranks_with_their_places() {
    let options = GroupOptions { timeout: Duration::from_secs(20), ..GroupOptions::default() };
    let outcomes = LocalGroup::outcomes(4, &options, |group| {
        let mesh = Mesh::new(&group, MeshShape::default().with(Axis::Pp, 2).with(Axis::Tp, 2))?;
        match group.rank() {
            3 => Err(mesh.axis(Axis::Tp).abort("out of memory")),
            2 => mesh.axis(Axis::Tp).barrier(),
            _ => Ok(()),
        }
    });
    let error = outcomes[2].as_ref().unwrap_err().to_string();
    assert!(error.starts_with("rank 3 (pp 1, tp 1) called off group"), "{error}");
    let plain = LocalGroup::outcomes(2, &options, |group| match group.rank() {
        0 => group.barrier(),
        _ => Err(group.abort("out of memory")),
    });
    let error = plain[0].as_ref().unwrap_err().to_string();
    assert!(error.starts_with("rank 1 called off group"), "control: {error}");
}
