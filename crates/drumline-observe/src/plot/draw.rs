//! Draws panels as a picture, larger than shown: plotters puts points on whole pixels, and only a finer drawing looks smooth.

use std::sync::Once;

use image::ImageEncoder;
use image::codecs::png::PngEncoder;
use plotters::coord::Shift;
use plotters::coord::ranged1d::{KeyPointHint, NoDefaultFormatting, ValueFormatter};
use plotters::prelude::*;
use plotters::style::register_font;

use super::axis::Axis;
use super::curve::{Curve, Kind, Line, Panel};
use super::{PlotError, PlotOptions, Scale};

type Chart<'a, B> = ChartContext<'a, B, Cartesian2d<Axis, Axis>>;
type Result<T> = std::result::Result<T, PlotError>;

/// How many times larger it is drawn.
const FINE: u32 = 4;
/// Pixels of a PNG for each point.
const PIXELS: u32 = 2;
/// The side of the square of drawn pixels that becomes one pixel of a PNG.
const SQUARE: usize = (FINE / PIXELS) as usize;

const FONT: &str = "sans-serif";
const INK: RGBColor = RGBColor(40, 44, 52);
const FAINT: RGBColor = RGBColor(226, 229, 233);
const AXIS: RGBColor = RGBColor(150, 155, 163);

/// Colours that people with colour blindness can distinguish, after Okabe and Ito, without their yellow, which is invisible on
/// white.
const COLORS: [RGBColor; 7] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(86, 180, 233),
    RGBColor(230, 159, 0),
    RGBColor(90, 90, 90),
];

/// A name in a legend is at most this long.
const LONGEST_NAME: usize = 36;
/// A curve with more points has no dots: they would hide it.
const MOST_DOTS: usize = 100;

/// The picture as text.
pub(super) fn svg(panels: &[Panel], options: PlotOptions) -> Result<String> {
    let (columns, rows) = grid(panels.len());
    let (width, height) = (columns as u32 * options.panel.0, rows as u32 * options.panel.1);
    let fine = (width * FINE, height * FINE);
    let mut text = String::new();
    {
        let area = SVGBackend::with_string(&mut text, fine).into_drawing_area();
        area.fill(&WHITE).map_err(failed)?;
        for (panel, place) in panels.iter().zip(area.split_evenly((rows, columns))) {
            draw(panel, &place, options, Joints::OfBackend)?;
        }
        area.present().map_err(failed)?;
    }
    let drawn = format!("width=\"{}\" height=\"{}\"", fine.0, fine.1);
    Ok(text.replacen(&drawn, &format!("width=\"{width}\" height=\"{height}\""), 1))
}

/// The picture as PNG. Panels are drawn one by one, since each takes about 15 MB.
pub(super) fn png(panels: &[Panel], options: PlotOptions) -> Result<Vec<u8>> {
    let (columns, rows) = grid(panels.len());
    let (width, height) = (options.panel.0 * PIXELS, options.panel.1 * PIXELS);
    let (line, row) = (columns * width as usize * 3, width as usize * 3);
    let mut pixels = vec![255; line * rows * height as usize];
    for (at, panel) in panels.iter().enumerate() {
        let drawn = panel_pixels(panel, options)?;
        let first = (at / columns) * height as usize * line + (at % columns) * row;
        for (y, from) in drawn.chunks_exact(row).enumerate() {
            pixels[first + y * line..][..row].copy_from_slice(from);
        }
    }
    let (width, height) = (width * columns as u32, height * rows as u32);
    let mut file = Vec::new();
    let encoder = PngEncoder::new(&mut file);
    encoder.write_image(&pixels, width, height, image::ExtendedColorType::Rgb8).map_err(failed)?;
    Ok(file)
}

fn panel_pixels(panel: &Panel, options: PlotOptions) -> Result<Vec<u8>> {
    let (width, height) = (options.panel.0 * FINE, options.panel.1 * FINE);
    let mut fine = vec![255; width as usize * height as usize * 3];
    {
        let area = BitMapBackend::with_buffer(&mut fine, (width, height)).into_drawing_area();
        draw(panel, &area, options, Joints::Round)?;
        area.present().map_err(failed)?;
    }
    Ok(shrunk(&fine, width as usize))
}

/// The mean of each square of [`SQUARE`] × [`SQUARE`] pixels of a picture in RGB.
fn shrunk(fine: &[u8], width: usize) -> Vec<u8> {
    let mut shown = Vec::with_capacity(fine.len() / (SQUARE * SQUARE));
    for rows in fine.chunks_exact(width * 3 * SQUARE) {
        for x in 0..width / SQUARE {
            for color in 0..3 {
                let at = |i: usize| rows[(i / SQUARE * width + x * SQUARE + i % SQUARE) * 3 + color];
                let sum: usize = (0..SQUARE * SQUARE).map(|i| usize::from(at(i))).sum();
                shown.push(((sum + SQUARE * SQUARE / 2) / (SQUARE * SQUARE)) as u8);
            }
        }
    }
    shown
}

/// Columns and rows.
fn grid(panels: usize) -> (usize, usize) {
    let columns = panels.clamp(1, 2);
    (columns, panels.div_ceil(columns).max(1))
}

fn failed(error: impl std::fmt::Display) -> PlotError {
    PlotError::Draw(error.to_string())
}

/// Registers the font for pixels and for the width of texts; the system may not have one.
fn prepare_font() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // If it cannot be read, drawing returns an error.
        let _ = register_font(FONT, FontStyle::Normal, epaint_default_fonts::UBUNTU_LIGHT);
    });
}

/// A length in points, in units of the drawing.
fn fine(points: u32) -> u32 {
    points * FINE
}

fn draw<B: DrawingBackend>(
    panel: &Panel,
    area: &DrawingArea<B, Shift>,
    options: PlotOptions,
    joints: Joints,
) -> Result<()> {
    prepare_font();
    let text = |size: u32| (FONT, fine(size)).into_font().color(&INK);
    let x = Axis::around(panel.points().map(|(step, _)| step), Scale::Linear, 0.02, 7);
    let y = Axis::around(panel.points().map(|(_, value)| value), options.scale, 0.06, 7);
    let mut chart = ChartBuilder::on(area)
        .margin(fine(14))
        .caption(&panel.metric, text(21))
        .x_label_area_size(fine(44))
        .y_label_area_size(fine(58))
        .build_cartesian_2d(x.clone(), y.clone())
        .map_err(failed)?;
    let mut mesh = chart.configure_mesh();
    mesh.bold_line_style(FAINT.stroke_width(FINE))
        .light_line_style(TRANSPARENT)
        .set_all_tick_mark_size(fine(6));
    mesh.axis_style(AXIS.stroke_width(FINE)).label_style(text(15)).axis_desc_style(text(15));
    mesh.x_desc("step").draw().map_err(failed)?;
    for curve in &panel.curves {
        let style = faint(color(curve)).stroke_width(FINE);
        let lines = curve.raw.iter().flat_map(|line| joints.lines(placed(line, &y), style));
        chart.draw_series(lines).map_err(failed)?;
    }
    panel.curves.iter().try_for_each(|curve| draw_curve(&mut chart, curve, &y, joints))?;
    let mut legend = chart.configure_series_labels();
    legend.label_font(text(15)).background_style(WHITE.mix(0.85)).border_style(FAINT.stroke_width(FINE));
    let place = legend_place(panel, &x, &y, options);
    legend.margin(fine(8)).legend_area_size(fine(30)).position(place).draw().map_err(failed)
}

fn draw_curve<'a, B: DrawingBackend + 'a>(
    chart: &mut Chart<'a, B>,
    curve: &Curve,
    y: &Axis,
    joints: Joints,
) -> Result<()> {
    let style = color(curve).stroke_width(fine(2));
    let lines = curve.lines.iter().flat_map(|line| joints.lines(placed(line, y), style));
    let drawn = chart.draw_series(lines).map_err(failed)?;
    let (dot, size) = (color(curve).filled(), if has_dots(curve) { fine(3) } else { 0 });
    drawn.label(short(&curve.name)).legend(move |(left, middle)| {
        let line = vec![(0, 0), (fine(22) as i32, 0)];
        let dot = Circle::new((fine(11) as i32, 0), size, dot);
        EmptyElement::at((left, middle)) + PathElement::new(line, style) + dot
    });
    let size = match joints {
        Joints::Round => size.max(fine(1)),
        Joints::OfBackend => size,
    };
    let points = curve.lines.iter().filter(|_| size > 0).flat_map(|line| placed(line, y));
    chart.draw_series(points.map(|point| Circle::new(point, size, dot))).map_err(failed)?;
    Ok(())
}

fn placed(line: &Line, y: &Axis) -> Line {
    line.iter().map(|(step, value)| (*step, y.place(*value))).collect()
}

/// How the segments of a line are joined.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Joints {
    /// By the backend: good in SVG.
    OfBackend,
    /// With dots: plotters draws thick lines in pixels with spikes at sharp turns, far beyond the plot.
    Round,
}

impl Joints {
    fn lines(self, line: Line, style: ShapeStyle) -> Vec<PathElement<(f64, f64)>> {
        match self {
            Self::OfBackend => vec![PathElement::new(line, style)],
            Self::Round => line.windows(2).map(|pair| PathElement::new(pair.to_vec(), style)).collect(),
        }
    }
}

/// The axis for plotters, by places.
impl Ranged for Axis {
    type FormatOption = NoDefaultFormatting;
    type ValueType = f64;

    fn map(&self, place: &f64, limit: (i32, i32)) -> i32 {
        let (low, high) = limit;
        low + (self.part(*place) * f64::from(high - low)).round() as i32
    }

    fn key_points<Hint: KeyPointHint>(&self, _: Hint) -> Vec<f64> {
        self.marks.clone()
    }

    fn range(&self) -> std::ops::Range<f64> {
        self.range.clone()
    }
}

impl ValueFormatter<f64> for Axis {
    fn format(mark: &f64) -> String {
        mark.to_string()
    }

    fn format_ext(&self, mark: &f64) -> String {
        self.label(*mark)
    }
}

fn color(curve: &Curve) -> RGBColor {
    COLORS[curve.color % COLORS.len()]
}

/// A lighter colour. Not transparent: there would be a dark spot where two lines meet.
fn faint(color: RGBColor) -> RGBColor {
    let mix = |part: u8| 255 - ((255 - u16::from(part)) * 3 / 10) as u8;
    RGBColor(mix(color.0), mix(color.1), mix(color.2))
}

/// A curve of single points is visible only by its dots.
fn has_dots(curve: &Curve) -> bool {
    let points: usize = curve.lines.iter().map(Vec::len).sum();
    points == curve.lines.len() || (curve.kind == Kind::Eval && points <= MOST_DOTS)
}

/// Shortens a long name. The end of a path is more useful than its beginning.
fn short(name: &str) -> String {
    let len = name.chars().count();
    if len <= LONGEST_NAME {
        return name.to_owned();
    }
    "…".chars().chain(name.chars().skip(len - LONGEST_NAME + 1)).collect()
}

/// The corner in which the legend hides the fewest points.
fn legend_place(panel: &Panel, x: &Axis, y: &Axis, options: PlotOptions) -> SeriesLabelPosition {
    let longest = panel.curves.iter().map(|curve| short(&curve.name).chars().count()).max().unwrap_or(0);
    // In points, from the size of a letter and a line; margins and labels make the plot smaller than the panel.
    let (width, height) = (8 * longest + 46, 20 * panel.curves.len() + 16);
    let part = (
        width as f64 / (f64::from(options.panel.0) - 90.0),
        height as f64 / (f64::from(options.panel.1) - 110.0),
    );
    let points = || panel.curves.iter().flat_map(|curve| curve.lines.iter().flatten());
    let places = || points().map(|(step, value)| (x.part(*step), y.part(y.place(*value))));
    let hidden = |right: bool, upper: bool| {
        let along = |at: f64, part: f64, end: bool| if end { at > 1.0 - part } else { at < part };
        places().filter(|(at, up)| along(*at, part.0, right) && along(*up, part.1, upper)).count()
    };
    let corners = [
        ((true, true), SeriesLabelPosition::UpperRight),
        ((true, false), SeriesLabelPosition::LowerRight),
        ((false, true), SeriesLabelPosition::UpperLeft),
        ((false, false), SeriesLabelPosition::LowerLeft),
    ];
    let best = corners.into_iter().min_by_key(|((right, upper), _)| hidden(*right, *upper));
    best.map_or(SeriesLabelPosition::UpperRight, |(_, place)| place)
}

#[cfg(test)]
mod tests {
    use super::shrunk;

    #[test]
    fn a_pixel_is_the_mean_of_its_square() {
        // 4 × 2 pixels: the left square is black with one white corner, the right one has three equal colours.
        let (black, white, gray) = ([0; 3], [255; 3], [10, 20, 30]);
        let fine = [black, black, gray, gray, white, black, gray, gray].concat();
        assert_eq!(shrunk(&fine, 4), [64, 64, 64, 10, 20, 30]);
    }
}
