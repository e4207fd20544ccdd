//! The layout of a unit: parameters that are gathered and freed together lie one after the other in flat memory, and each
//! rank owns an equal part of it.
//!
//! ```text
//!   rank            0             1             2             3
//!   flat    |  w (rows 0-2)  |  rows 3-5   | 6, 7 | b |pad|   v    |      cuts at equal distances, at rows of a tensor,
//!           0               S            2S             3S        4S      or in the padding between tensors
//! ```
//! A parameter is a view of the flat memory, so that a gathered unit needs no copy. Cuts are equal, because
//! collectives on GPUs want that, and they never divide a *row* (all elements with one index along the first dim), so that
//! a checkpoint of a shard consists of rectangles. Padding lies between tensors, never inside.
//!
//! Where tensors with odd rows would need much padding, the unit has several *segments*, each with cuts of its own.

use std::ops::Range;

/// Parameters begin at multiples of this many elements, where that costs little: 64 bytes of f32.
const LINE: usize = 16;

/// The largest part of a rank's share that aligning its cuts may add.
const SLACK: usize = 16;

/// A parameter, as a layout sees it. Tied parameters are one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Parameter {
    /// Its name in the model.
    pub name: String,
    /// Its size along each dim.
    pub shape: Vec<usize>,
}

impl Parameter {
    /// A parameter with this name and shape.
    pub fn new(name: impl Into<String>, shape: &[usize]) -> Self {
        Self { name: name.into(), shape: shape.to_vec() }
    }

    /// Its number of elements.
    pub fn num_elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// The number of its rows: its size along the first dim, 1 for a scalar.
    pub fn num_rows(&self) -> usize {
        self.shape.first().copied().unwrap_or(1)
    }

    /// The elements of a row.
    pub fn row_len(&self) -> usize {
        self.shape.iter().skip(1).product()
    }
}

/// The part of a parameter that a rank owns: whole rows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    /// The index of the parameter in the unit.
    pub parameter: usize,
    /// Its rows.
    pub rows: Range<usize>,
    /// Their elements in the flat memory.
    pub range: Range<usize>,
}

/// A part of the flat memory that is cut at equal distances. Each has a collective of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    /// Where it begins in the flat memory.
    pub start: usize,
    /// The elements of each rank.
    pub shard_len: usize,
}

/// Where the parameters of a unit lie, and which rank owns what.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnitLayout {
    num_ranks: usize,
    parameters: Vec<Parameter>,
    /// For each parameter its offset in the flat memory.
    offsets: Vec<usize>,
    segments: Vec<Segment>,
}

impl UnitLayout {
    /// Lays parameters out in this order, for this number of ranks (at least one).
    pub fn new(parameters: Vec<Parameter>, num_ranks: usize) -> Self {
        let num_ranks = num_ranks.max(1);
        let mut layout =
            Self { num_ranks, offsets: vec![0; parameters.len()], parameters, segments: Vec::new() };
        let mut first = 0;
        while first < layout.parameters.len() {
            let num = layout.num_of_segment(first);
            layout.add_segment(first..first + num);
            first += num;
        }
        layout
    }

    /// How many parameters from `first` on can share a segment.
    fn num_of_segment(&self, first: usize) -> usize {
        let rest = self.parameters.len() - first;
        let fits = |num: &usize| alignment(&self.parameters[first..first + num], self.num_ranks).is_some();
        (1..=rest).rev().find(fits).unwrap_or(1)
    }

    fn add_segment(&mut self, members: Range<usize>) {
        let start = self.flat_len();
        let parameters = &self.parameters[members.clone()];
        let step = alignment(parameters, self.num_ranks).unwrap_or_else(|| row_multiple(parameters));
        let total: usize = parameters.iter().map(Parameter::num_elements).sum();
        let mut shard_len = total.div_ceil(self.num_ranks).next_multiple_of(step);
        let offsets = loop {
            match placed(parameters, shard_len, shard_len * self.num_ranks) {
                Some(offsets) => break offsets,
                None => shard_len += step,
            }
        };
        for (offset, place) in offsets.into_iter().zip(&mut self.offsets[members]) {
            *place = start + offset;
        }
        self.segments.push(Segment { start, shard_len });
    }

    /// The number of ranks among which it is divided.
    pub fn num_ranks(&self) -> usize {
        self.num_ranks
    }

    /// The parameters, in their order.
    pub fn parameters(&self) -> &[Parameter] {
        &self.parameters
    }

    /// The offset of each parameter in the flat memory.
    pub fn offsets(&self) -> &[usize] {
        &self.offsets
    }

    /// The parts with equal cuts.
    pub fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// The elements of the flat memory, with padding.
    pub fn flat_len(&self) -> usize {
        self.segments.last().map_or(0, |segment| segment.start + segment.shard_len * self.num_ranks)
    }

    /// The elements of all parameters.
    pub fn num_elements(&self) -> usize {
        self.parameters.iter().map(Parameter::num_elements).sum()
    }

    /// The elements of each rank's part, with padding.
    pub fn shard_len(&self) -> usize {
        self.segments.iter().map(|segment| segment.shard_len).sum()
    }

    /// The elements of the flat memory that a rank owns, a range for each segment.
    pub fn shards(&self, rank: usize) -> impl Iterator<Item = Range<usize>> {
        self.segments.iter().map(move |segment| {
            let begin = segment.start + rank * segment.shard_len;
            begin..begin + segment.shard_len
        })
    }

    /// The parts of parameters that a rank owns: what it steps, saves and loads.
    pub fn pieces(&self, rank: usize) -> Vec<Piece> {
        let mut pieces: Vec<Piece> = self.shards(rank).flat_map(|shard| self.pieces_in(&shard)).collect();
        pieces.sort_by_key(|piece| piece.parameter);
        pieces
    }

    fn pieces_in(&self, shard: &Range<usize>) -> Vec<Piece> {
        let piece = |(index, parameter): (usize, &Parameter)| {
            let offset = self.offsets[index];
            let range = shard.start.max(offset)..shard.end.min(offset + parameter.num_elements());
            if range.is_empty() {
                return None;
            }
            let row_len = parameter.row_len();
            let rows = (range.start - offset) / row_len..(range.end - offset) / row_len;
            Some(Piece { parameter: index, rows, range })
        };
        self.parameters.iter().enumerate().filter_map(piece).collect()
    }
}

/// Where each parameter of a segment begins, if all fit into `len` elements with a cut at every multiple of `shard_len`.
fn placed(parameters: &[Parameter], shard_len: usize, len: usize) -> Option<Vec<usize>> {
    let mut end = 0;
    let mut offsets = Vec::with_capacity(parameters.len());
    for parameter in parameters {
        let offset = (end..=len).find(|&offset| {
            (offset % LINE == 0 || offset == end) && is_cut_at_rows(parameter, offset, shard_len)
        })?;
        end = offset + parameter.num_elements();
        if end > len {
            return None;
        }
        offsets.push(offset);
    }
    Some(offsets)
}

/// Whether each cut inside the parameter is between two rows.
fn is_cut_at_rows(parameter: &Parameter, offset: usize, shard_len: usize) -> bool {
    let (len, row_len) = (parameter.num_elements(), parameter.row_len());
    if len == 0 {
        return true;
    }
    let first = (offset / shard_len + 1) * shard_len;
    let mut cuts = (first..offset + len).step_by(shard_len);
    cuts.all(|cut| (cut - offset).is_multiple_of(row_len))
}

/// Parameters that are longer than a rank's share, and so have more than one cut: the distance of cuts must be a multiple
/// of their rows.
fn cut_often(parameters: &[Parameter], num_ranks: usize) -> impl Iterator<Item = &Parameter> {
    let total: usize = parameters.iter().map(Parameter::num_elements).sum();
    let share = total.div_ceil(num_ranks);
    parameters.iter().filter(move |parameter| parameter.num_elements() > share)
}

/// The step of cuts that suits all these parameters; `None` if it would add too much to a rank's share.
fn alignment(parameters: &[Parameter], num_ranks: usize) -> Option<usize> {
    let total: usize = parameters.iter().map(Parameter::num_elements).sum();
    let rows = cut_often(parameters, num_ranks).map(Parameter::row_len).try_fold(1, lcm)?;
    let most = (total / num_ranks / SLACK).max(LINE);
    let with_line = lcm(rows, LINE).filter(|step| *step <= most);
    with_line.or_else(|| (rows <= most).then_some(rows))
}

/// A step of cuts for a segment that cannot have a small one.
fn row_multiple(parameters: &[Parameter]) -> usize {
    parameters.iter().map(Parameter::row_len).max().unwrap_or(1).max(1)
}

fn lcm(a: usize, b: usize) -> Option<usize> {
    let (mut x, mut y) = (a, b);
    while y != 0 {
        (x, y) = (y, x % y);
    }
    a.checked_div(x).map_or(Some(1), |quotient| quotient.checked_mul(b))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn of(shapes: &[&[usize]], num_ranks: usize) -> UnitLayout {
        let parameters =
            shapes.iter().enumerate().map(|(index, shape)| Parameter::new(format!("p{index}"), shape));
        UnitLayout::new(parameters.collect(), num_ranks)
    }

    fn shapes() -> impl Strategy<Value = Vec<Vec<usize>>> {
        let size = prop_oneof![Just(0usize), Just(1), Just(2), 3usize..40, Just(64), Just(147)];
        let shape = prop::collection::vec(size, 0..4);
        prop::collection::vec(shape, 0..12)
    }

    proptest! {
        #[test]
        fn every_element_has_one_owner(shapes in shapes(), num_ranks in 1usize..9) {
            let shapes: Vec<&[usize]> = shapes.iter().map(Vec::as_slice).collect();
            let layout = of(&shapes, num_ranks);
            let mut rows: Vec<Vec<usize>> =
                layout.parameters().iter().map(|parameter| vec![0; parameter.num_rows()]).collect();
            for piece in (0..num_ranks).flat_map(|rank| layout.pieces(rank)) {
                let parameter = &layout.parameters()[piece.parameter];
                let begin = layout.offsets()[piece.parameter] + piece.rows.start * parameter.row_len();
                prop_assert_eq!(piece.range.clone(), begin..begin + piece.rows.len() * parameter.row_len());
                piece.rows.for_each(|row| rows[piece.parameter][row] += 1);
            }
            for (owned, parameter) in rows.iter().zip(layout.parameters()) {
                let expected = usize::from(parameter.num_elements() > 0);
                prop_assert!(owned.iter().all(|owners| *owners == expected), "{:?}", layout);
            }
        }

        #[test]
        fn parameters_do_not_overlap_and_lie_inside(shapes in shapes(), num_ranks in 1usize..9) {
            let shapes: Vec<&[usize]> = shapes.iter().map(Vec::as_slice).collect();
            let layout = of(&shapes, num_ranks);
            let mut end = 0;
            for (parameter, offset) in layout.parameters().iter().zip(layout.offsets()) {
                prop_assert!(*offset >= end);
                end = offset + parameter.num_elements();
            }
            prop_assert!(end <= layout.flat_len());
            prop_assert_eq!(layout.flat_len(), layout.shard_len() * num_ranks);
            let owned: usize = (0..num_ranks).flat_map(|rank| layout.pieces(rank)).map(|piece| piece.range.len()).sum();
            prop_assert_eq!(owned, layout.num_elements());
        }
    }

    #[test]
    fn the_blocks_of_a_gpt_need_hardly_any_padding() {
        for width in [384, 768, 1600, 5120] {
            let block: [&[usize]; 8] = [
                &[3 * width, width],
                &[3 * width],
                &[width, width],
                &[width],
                &[4 * width, width],
                &[4 * width],
                &[width, 4 * width],
                &[width],
            ];
            for num_ranks in 1..=8 {
                let layout = of(&block, num_ranks);
                let slack = layout.flat_len() as f64 / layout.num_elements() as f64;
                assert!(slack < 1.02, "{width} on {num_ranks}: {slack}");
                assert_eq!(layout.segments().len(), 1);
                assert!(layout.offsets().iter().all(|offset| offset % LINE == 0), "{layout:?}");
            }
        }
    }

    #[test]
    fn odd_rows_are_cut_in_segments_of_their_own() {
        let layout = of(&[&[64, 3, 7, 7], &[101, 103], &[107, 109]], 4);
        assert!(layout.segments().len() > 1);
        let slack = layout.flat_len() as f64 / layout.num_elements() as f64;
        assert!(slack < 1.1, "{slack}: {layout:?}");
    }

    #[test]
    fn a_rank_may_own_nothing() {
        let layout = of(&[&[2, 1000]], 3);
        let rows: Vec<usize> =
            (0..3).map(|rank| layout.pieces(rank).iter().map(|piece| piece.rows.len()).sum()).collect();
        assert_eq!(rows, [1, 1, 0]);
        assert_eq!(of(&[], 3).flat_len(), 0);
        assert_eq!(of(&[&[0, 7]], 3).pieces(0), []);
    }
}
