//! Tests of checkpoints whose tensors several ranks wrote, each to files of its own: any number of ranks reads them,
//! and damage is found.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use drumline_comm::{Axis, LocalGroup, MeshShape, ProcessGroup};
use drumline_parallel::{Placed, Whole};
use drumline_torch::{Named, RngState, bytes};
use tch::{Device, Kind, Tensor};

use super::load::check;
use super::manifest::Manifest;
use super::{CheckpointError, Checkpoints, Mark, ReadSums, Region, Section, Shard, ShardReader, ShardWriter};
use super::{Loaded, RunState, StateLayout, TensorPart, restore, rng};

type Tested = (Section, &'static str, &'static [usize], Option<usize>);

/// Tensors, and the dim along which ranks have cut them.
const TENSORS: [Tested; 5] = [
    (Section::Model, "rows", &[5, 3], Some(0)),
    (Section::Model, "columns", &[2, 4], Some(1)),
    (Section::Model, "number", &[], None),
    (Section::Model, "nothing", &[0, 2], None),
    (Section::Optimizer, "rows.exp_avg", &[5, 3], Some(0)),
];

fn filled(step: u64, name: &str, shape: &[usize]) -> Tensor {
    let size: Vec<i64> = shape.iter().map(|size| *size as i64).collect();
    let numbers = Tensor::arange(size.iter().product::<i64>(), (Kind::Float, Device::Cpu));
    (numbers + step as f64 * 100.0 + name.len() as f64).view(&size[..])
}

fn region(shape: &[usize], cut: Option<usize>, rank: usize, num_ranks: usize) -> Option<Region> {
    let Some(dim) = cut else { return (rank == 0).then(|| Region::whole(shape)) };
    let (mut offsets, mut sizes) = (vec![0; shape.len()], shape.to_vec());
    offsets[dim] = (rank * shape[dim].div_ceil(num_ranks)).min(shape[dim]);
    sizes[dim] = shape[dim].div_ceil(num_ranks).min(shape[dim] - offsets[dim]);
    Some(Region::new(&offsets, &sizes, shape).unwrap())
}

fn narrowed(tensor: &Tensor, region: &Region) -> Tensor {
    let dims = region.offsets().iter().zip(region.shape()).enumerate();
    dims.fold(tensor.shallow_clone(), |tensor, (dim, (offset, size))| {
        tensor.narrow(dim as i64, *offset as i64, *size as i64)
    })
}

/// The files that a rank writes.
fn write_rank(folder: &Path, step: u64, rank: usize, num_ranks: usize) -> Vec<Shard> {
    let mut shards = Vec::new();
    for section in [Section::Model, Section::Optimizer] {
        let mut writer = ShardWriter::new(section);
        for (_, name, shape, cut) in TENSORS.into_iter().filter(|tensor| tensor.0 == section) {
            let Some(region) = region(shape, cut, rank, num_ranks) else { continue };
            let tensor = narrowed(&filled(step, name, shape), &region);
            let (offsets, global_shape) = (region.offsets().to_vec(), shape.to_vec());
            writer.add(TensorPart { name: name.into(), global_shape, offsets, tensor }).unwrap();
        }
        shards.push(writer.write(folder, &section.shard_file(rank)).unwrap());
    }
    shards
}

fn save(dir: &Path, step: u64, num_ranks: usize) -> PathBuf {
    tch::set_num_threads(1);
    let folder = dir.join(format!("step-{step:08}"));
    fs::create_dir(&folder).unwrap();
    let mut shards: Vec<_> =
        (0..num_ranks).flat_map(|rank| write_rank(&folder, step, rank, num_ranks)).collect();
    let generators: Vec<_> =
        (0..num_ranks).map(|rank| RngState { cpu: vec![rank as u8; 8], cuda: Vec::new() }).collect();
    let mut writer = ShardWriter::new(Section::Rng);
    for named in rng::to_tensors(&generators).unwrap() {
        writer.add(TensorPart::whole(&named)).unwrap();
    }
    shards.push(writer.write(&folder, &Section::Rng.file()).unwrap());
    let mut state = RunState::new(Vec::new()).unwrap();
    (state.step, state.optimizer.kind) = (step, "adam".into());
    let mesh = MeshShape::default().with(Axis::Shard, num_ranks);
    Manifest::new(&state, Mark::Latest, mesh, shards).unwrap().write(&folder).unwrap();
    folder
}

fn load(dir: &Path, group: &ProcessGroup) -> Result<Option<Loaded>, CheckpointError> {
    Checkpoints::new(dir).read_only().load_latest(group)
}

#[track_caller]
fn assert_whole(loaded: &Loaded) {
    let tensors: Vec<&Named> = loaded.state.model.iter().chain(&loaded.state.optimizer.tensors).collect();
    assert_eq!(tensors.len(), TENSORS.len());
    for (_, name, shape, _) in TENSORS {
        let found = tensors.iter().find(|named| named.name == name).unwrap();
        let expected = filled(loaded.state.step, name, shape);
        assert_eq!(found.tensor.size(), expected.size(), "{name}");
        assert_eq!(bytes(&found.tensor).unwrap(), bytes(&expected).unwrap(), "{name}");
    }
}

#[test]
fn any_number_of_ranks_reads_what_any_number_wrote() {
    for num_writers in 1..6 {
        let dir = tempfile::tempdir().unwrap();
        save(dir.path(), 3, num_writers);
        for num_readers in 1..4 {
            LocalGroup::run(num_readers, |group| {
                let loaded = load(dir.path(), &group).unwrap().unwrap();
                assert_whole(&loaded);
                assert_eq!((loaded.state.step, loaded.world_size), (3, num_writers));
                assert_eq!(loaded.mesh.size(Axis::Shard), num_writers);
                assert_eq!(loaded.has_new_rng, group.rank() >= num_writers);
                Ok(())
            })
            .unwrap();
        }
    }
}

/// The layout of a rank that holds the parts that it would write. Numbers that are whole are on all ranks.
fn layout(rank: usize, num_ranks: usize) -> StateLayout {
    let whole = |(_, name, shape, _): Tested| Whole {
        name: name.into(),
        size: shape.iter().map(|size| *size as i64).collect(),
    };
    let model = TENSORS.into_iter().filter(|tensor| tensor.0 == Section::Model);
    let held = model.clone().map(|(_, name, shape, cut)| {
        let region =
            cut.map_or_else(|| Region::whole(shape), |_| region(shape, cut, rank, num_ranks).unwrap());
        Placed {
            name: name.into(),
            tensor: narrowed(&filled(0, name, shape), &region),
            whole: shape.iter().map(|size| *size as i64).collect(),
            offsets: region.offsets().iter().map(|offset| *offset as i64).collect(),
            is_saved_here: cut.is_some() || rank == 0,
            boxes: Vec::new(),
        }
    });
    StateLayout::new(&model.clone().map(whole).collect::<Vec<_>>(), &held.collect::<Vec<_>>()).unwrap()
}

#[test]
fn each_rank_reads_only_what_it_holds_whatever_the_ranks_that_wrote() {
    for num_writers in 1..5 {
        let dir = tempfile::tempdir().unwrap();
        save(dir.path(), 3, num_writers);
        for num_readers in 1..5 {
            LocalGroup::run(num_readers, |group| {
                let checkpoints = Checkpoints::new(dir.path()).read_only();
                let mut found = checkpoints.find_latest(&group).unwrap().unwrap();
                assert!(found.state.model.is_empty() && found.state.optimizer.tensors.is_empty());
                assert_eq!((found.state.step, found.world_size, found.num_bytes_read()), (3, num_writers, 0));
                found.read_parts(Some(&layout(group.rank(), num_readers)), &group).unwrap();
                let read: Vec<_> = found.state.model.iter().chain(&found.state.optimizer.tensors).collect();
                let mut needed = 0;
                for (_, name, shape, cut) in TENSORS {
                    let region = cut.map_or(Region::whole(shape), |_| {
                        region(shape, cut, group.rank(), num_readers).unwrap()
                    });
                    let found = read.iter().find(|named| named.name == name).unwrap();
                    let expected = narrowed(&filled(3, name, shape), &region).contiguous();
                    assert_eq!(found.tensor.size(), expected.size(), "{name}");
                    assert_eq!(bytes(&found.tensor).unwrap(), bytes(&expected).unwrap(), "{name}");
                    needed += 4 * region.num_elements() as u64;
                }
                assert_eq!((read.len(), found.num_bytes_read()), (TENSORS.len(), needed));
                Ok(())
            })
            .unwrap();
        }
    }
}

#[test]
fn a_layout_of_another_model_is_an_error_with_all_differences_before_anything_is_read() {
    let dir = tempfile::tempdir().unwrap();
    save(dir.path(), 3, 2);
    let messages = LocalGroup::run(2, |group| {
        let mut found = Checkpoints::new(dir.path()).read_only().find_latest(&group).unwrap().unwrap();
        let other = [("rows", vec![6, 3]), ("bias", vec![2])];
        let other = other.map(|(name, size)| Whole { name: name.into(), size });
        let layout = StateLayout::new(&other, &[]).unwrap();
        let message = found.read_parts(Some(&layout), &group).unwrap_err().to_string();
        assert_eq!(found.num_bytes_read(), 0);
        Ok(message)
    })
    .unwrap();
    assert_eq!(messages[0], messages[1]);
    for part in [
        "`bias` is not in the checkpoint",
        "`columns` is not in the model",
        "`rows` has shape [5, 3] in the checkpoint and [6, 3] in the model",
    ] {
        assert!(messages[0].contains(part), "{}", messages[0]);
    }
}

#[test]
fn a_changed_byte_anywhere_in_any_file_is_found() {
    let dir = tempfile::tempdir().unwrap();
    let folder = save(dir.path(), 3, 2);
    check(&folder).unwrap();
    let files: Vec<_> = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert_eq!(files.len(), 6);
    for file in files {
        let bytes = fs::read(&file).unwrap();
        let opened = fs::OpenOptions::new().write(true).open(&file).unwrap();
        for (place, byte) in bytes.iter().enumerate() {
            opened.write_all_at(&[byte ^ 1 << (place % 8)], place as u64).unwrap();
            assert!(check(&folder).unwrap_err().is_damage(), "byte {place} of {}", file.display());
            opened.write_all_at(&[*byte], place as u64).unwrap();
        }
    }
    check(&folder).unwrap();
}

type Damage = fn(&Path);

#[test]
fn a_missing_short_or_changed_file_is_named_and_the_checkpoint_before_is_the_fallback() {
    let damage: [(Damage, &str); 3] = [
        (
            |file| fs::remove_file(file).unwrap(),
            "shard-00002-model-00001-of-00001.safetensors cannot be read: No such file",
        ),
        (
            |file| fs::write(file, "short").unwrap(),
            "shard-00002-model-00001-of-00001.safetensors is damaged: it has 5 bytes",
        ),
        (
            |file| {
                let mut bytes = fs::read(file).unwrap();
                *bytes.last_mut().unwrap() ^= 1;
                fs::write(file, bytes).unwrap();
            },
            "shard-00002-model-00001-of-00001.safetensors is damaged: its checksum is",
        ),
    ];
    for (damage, expected_text) in &damage {
        let dir = tempfile::tempdir().unwrap();
        save(dir.path(), 1, 2);
        let newest = save(dir.path(), 2, 3);
        damage(&newest.join(Section::Model.shard_file(1)));
        LocalGroup::run(2, |group| {
            let loaded = Checkpoints::new(dir.path()).load_latest(&group).unwrap().unwrap();
            assert_whole(&loaded);
            assert_eq!(loaded.state.step, 1);
            assert!(loaded.refused[0].reason.contains(*expected_text), "{}", loaded.refused[0]);
            Ok(())
        })
        .unwrap();
        assert!(dir.path().join("bad-step-00000002").exists());
    }
    for ((damage, expected_text), num_readers) in damage.into_iter().zip([1, 2, 3]) {
        let dir = tempfile::tempdir().unwrap();
        save(dir.path(), 1, 2);
        let newest = save(dir.path(), 2, 3);
        damage(&newest.join(Section::Model.shard_file(1)));
        LocalGroup::run(num_readers, |group| {
            let mut found = Checkpoints::new(dir.path()).find_latest(&group).unwrap().unwrap();
            found.read_parts(None, &group).unwrap();
            assert_whole(&found);
            assert_eq!(found.state.step, 1);
            assert!(found.refused[0].reason.contains(expected_text), "{}", found.refused[0]);
            Ok(())
        })
        .unwrap();
        assert!(dir.path().join("bad-step-00000002").exists());
        damage(&dir.path().join("step-00000001").join(Section::Model.shard_file(1)));
        let messages = LocalGroup::run(num_readers, |group| {
            Ok(Checkpoints::new(dir.path()).find_latest(&group).unwrap_err().to_string())
        })
        .unwrap();
        assert!(messages.iter().all(|message| message.contains("can be used:")), "{messages:?}");
        assert!(messages[0].contains(expected_text) && messages[0].contains("it was found damaged before"));
    }
}

#[test]
fn a_section_is_read_in_parts_and_only_the_bytes_of_a_part() {
    let dir = tempfile::tempdir().unwrap();
    let folder = save(dir.path(), 3, 3);
    let reader = ShardReader::open_section(&folder, Section::Model).unwrap();
    assert_eq!(reader.names().collect::<Vec<_>>(), ["columns", "nothing", "number", "rows"]);
    let wanted = Region::new(&[1, 1], &[3, 2], &[5, 3]).unwrap();
    let found = reader.read("rows", &wanted).unwrap();
    assert_eq!(found, filled(3, "rows", &[5, 3]).narrow(0, 1, 3).narrow(1, 1, 2));
    assert_eq!(reader.num_bytes_read(), 3 * 2 * 4);
    // A changed byte is found in a part that is read completely, and a missing file in any case.
    let file = folder.join(Section::Model.shard_file(0));
    let mut bytes = fs::read(&file).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&file, bytes).unwrap();
    let message = reader.read_whole("rows").unwrap_err().to_string();
    assert!(message.contains("is damaged: the checksum of a tensor in it is"), "{message}");
    fs::remove_file(folder.join(Section::Model.shard_file(2))).unwrap();
    let reader = ShardReader::open_section(&folder, Section::Model).unwrap();
    let last_row = Region::new(&[4, 0], &[1, 3], &[5, 3]).unwrap();
    let message = reader.read("rows", &last_row).unwrap_err().to_string();
    assert!(
        message.contains("shard-00003-model-00001-of-00001.safetensors cannot be read: No such file"),
        "{message}"
    );
    let outside = reader.read("rows", &Region::whole(&[6, 3])).unwrap_err().to_string();
    assert!(outside.starts_with("tensor `rows`: offsets [0, 0] and shape [6, 3] are no region"), "{outside}");
    assert_eq!(reader.read_whole("bias").unwrap_err().to_string(), "there is no tensor `bias`");
}

#[test]
fn ranks_that_read_pieces_find_a_changed_byte_together() {
    let dir = tempfile::tempdir().unwrap();
    let folder = save(dir.path(), 3, 1);
    let file = folder.join(Section::Model.shard_file(0));
    let read = || {
        // The last of three ranks reads nothing.
        LocalGroup::run(3, |group| {
            let reader = ShardReader::open_section(&folder, Section::Model).unwrap();
            let rows = Region::new(&[(group.rank() * 3).min(5), 0], &[[3, 2, 0][group.rank()], 3], &[5, 3]);
            let _rows = reader.read("rows", &rows.unwrap()).unwrap();
            let mut sums = ReadSums::default();
            group.all_gather_object(&reader.sums())?.into_iter().for_each(|one| sums.merge(one));
            Ok(reader.check(&sums).map_err(|error| error.to_string()))
        })
        .unwrap()
    };
    assert_eq!(read(), [Ok(()), Ok(()), Ok(())], "control");
    let mut bytes = fs::read(&file).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&file, bytes).unwrap();
    for message in read() {
        assert!(message.unwrap_err().contains("is damaged: the checksum of a tensor in it is"));
    }
}

#[test]
fn weights_in_several_files_are_a_folder() {
    let dir = tempfile::tempdir().unwrap();
    let folder = save(dir.path(), 3, 2);
    assert_eq!(Checkpoints::new(dir.path()).model_file().unwrap(), Some(folder));
}

#[test]
fn a_checkpoint_of_another_model_is_refused_with_all_differences() {
    let dir = tempfile::tempdir().unwrap();
    save(dir.path(), 3, 2);
    LocalGroup::run(1, |group| {
        let saved = load(dir.path(), &group).unwrap().unwrap().state.model;
        let model = [Named { name: "rows".into(), tensor: filled(0, "rows", &[6, 3]) }];
        let message = restore(&model, &saved).unwrap_err().to_string();
        assert!(
            message.contains("`rows` has shape [5, 3] in the checkpoint and [6, 3] in the model"),
            "{message}"
        );
        assert!(message.contains("`columns` is not in the model"), "{message}");
        Ok(())
    })
    .unwrap();
}

#[test]
fn a_part_outside_of_its_tensor_or_a_second_part_is_refused() {
    let mut writer = ShardWriter::new(Section::Model);
    let mut add = |offsets: Vec<usize>| {
        let tensor = filled(1, "w", &[2, 3]);
        writer.add(TensorPart { name: "w".into(), global_shape: vec![4, 3], offsets, tensor })
    };
    let message = add(vec![3, 0]).unwrap_err().to_string();
    assert!(message.starts_with("tensor `w`: offsets [3, 0] and shape [2, 3] are no region of"), "{message}");
    add(vec![2, 0]).unwrap();
    let message = add(vec![0, 0]).unwrap_err().to_string();
    assert_eq!(message, "cannot save tensor `w`: there are two of that name");
}
