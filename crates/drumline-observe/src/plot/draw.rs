//! Panels as a picture. Drawn larger than shown: plotters puts points on whole pixels, and what is drawn finer looks smooth.

use std::sync::Once;

use fast_image_resize::images::{Image, ImageRef};
use fast_image_resize::{FilterType, PixelType, ResizeAlg, ResizeOptions, Resizer};
use image::ImageEncoder;
use image::codecs::png::PngEncoder;
use plotters::coord::Shift;
use plotters::coord::ranged1d::{KeyPointHint, NoDefaultFormatting, ValueFormatter};
use plotters::prelude::*;
use plotters::style::register_font;

use super::axis::Axis;
use super::curve::{Curve, Kind, Line, Panel};
use super::{PlotError, PlotOptions, Scale};

type Result<T> = std::result::Result<T, PlotError>;

/// How many times finer it is drawn.
const FINE: u32 = 4;
/// Pixels of a PNG for each point.
const PIXELS: u32 = 2;

const FONT: &str = "sans-serif";
const INK: RGBColor = RGBColor(40, 44, 52);
const FAINT: RGBColor = RGBColor(226, 229, 233);

/// Told apart by people who see few colours, too: after Okabe and Ito, without their yellow, which is lost on white.
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
            draw(panel, &place, options.scale)?;
        }
        area.present().map_err(failed)?;
    }
    let drawn = format!("width=\"{}\" height=\"{}\"", fine.0, fine.1);
    Ok(text.replacen(&drawn, &format!("width=\"{width}\" height=\"{height}\""), 1))
}

/// The picture as a file of pixels. Panels are drawn one by one, as each takes some 15 MB.
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
        draw(panel, &area, options.scale)?;
        area.present().map_err(failed)?;
    }
    let fine = ImageRef::new(width, height, &fine, PixelType::U8x3).map_err(failed)?;
    let (width, height) = (options.panel.0 * PIXELS, options.panel.1 * PIXELS);
    let mut shown = Image::new(width, height, PixelType::U8x3);
    let mean = ResizeOptions::new().resize_alg(ResizeAlg::Convolution(FilterType::Box));
    Resizer::new().resize(&fine, &mut shown, &mean).map_err(failed)?;
    Ok(shown.into_vec())
}

/// Columns and rows.
fn grid(panels: usize) -> (usize, usize) {
    let columns = panels.clamp(1, 2);
    (columns, panels.div_ceil(columns).max(1))
}

fn failed(error: impl std::fmt::Display) -> PlotError {
    PlotError::Draw(error.to_string())
}

/// The font for pixels, and for the width of words; the system's may not be there.
fn prepare_font() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // If it could not be read, drawing says so.
        let _ = register_font(FONT, FontStyle::Normal, epaint_default_fonts::UBUNTU_LIGHT);
    });
}

/// So many points, where it is drawn.
fn fine(points: u32) -> u32 {
    points * FINE
}

fn draw<B: DrawingBackend>(panel: &Panel, area: &DrawingArea<B, Shift>, scale: Scale) -> Result<()> {
    prepare_font();
    let text = |size: u32| (FONT, fine(size)).into_font().color(&INK);
    let x = Axis::around(panel.points().map(|(step, _)| step), Scale::Linear, 0.02, 7);
    let y = Axis::around(panel.points().map(|(_, value)| value), scale, 0.06, 7);
    let mut chart = ChartBuilder::on(area)
        .margin(fine(14))
        .caption(&panel.metric, text(21))
        .x_label_area_size(fine(44))
        .y_label_area_size(fine(58))
        .build_cartesian_2d(x, y.clone())
        .map_err(failed)?;
    let mut mesh = chart.configure_mesh();
    mesh.bold_line_style(FAINT.stroke_width(FINE)).light_line_style(TRANSPARENT);
    mesh.axis_style(RGBColor(150, 155, 163).stroke_width(FINE))
        .label_style(text(15))
        .axis_desc_style(text(15));
    mesh.x_desc("step").draw().map_err(failed)?;
    let placed =
        |line: &Line| -> Line { line.iter().map(|(step, value)| (*step, y.place(*value))).collect() };
    for line in panel.curves.iter().flat_map(|curve| curve.raw.iter().map(move |line| (curve, line))) {
        let style = faint(color(line.0)).stroke_width(FINE);
        chart.draw_series(LineSeries::new(placed(line.1), style)).map_err(failed)?;
    }
    for curve in &panel.curves {
        let style = color(curve).stroke_width(fine(2));
        let parts: Vec<Line> = curve.lines.iter().map(placed).collect();
        let elements = parts.iter().map(|part| PathElement::new(part.clone(), style));
        let drawn = chart.draw_series(elements).map_err(failed)?;
        let (has_dots, dot) = (has_dots(curve), color(curve).filled());
        drawn.label(short(&curve.name)).legend(move |(left, middle)| {
            let line = vec![(0, 0), (fine(22) as i32, 0)];
            let size = if has_dots { fine(3) } else { 0 };
            let dot = Circle::new((fine(11) as i32, 0), size, dot);
            EmptyElement::at((left, middle)) + PathElement::new(line, style) + dot
        });
        if has_dots {
            let dots = parts.iter().flatten().map(|point| Circle::new(*point, fine(3), dot));
            chart.draw_series(dots).map_err(failed)?;
        }
    }
    let mut legend = chart.configure_series_labels();
    legend.label_font(text(15)).background_style(WHITE.mix(0.85)).border_style(FAINT.stroke_width(FINE));
    legend.margin(fine(8)).legend_area_size(fine(30)).position(legend_place(panel, &y));
    legend.draw().map_err(failed)
}

/// An axis as plotters asks for it, by places.
impl Ranged for Axis {
    type FormatOption = NoDefaultFormatting;
    type ValueType = f64;

    fn map(&self, place: &f64, (low, high): (i32, i32)) -> i32 {
        let part = (place - self.range.start) / (self.range.end - self.range.start);
        low + (part * f64::from(high - low)).round() as i32
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

/// As if seen through milk. Not transparent: where two lines meet there would be a dark spot.
fn faint(color: RGBColor) -> RGBColor {
    let mix = |part: u8| 255 - ((255 - u16::from(part)) * 3 / 10) as u8;
    RGBColor(mix(color.0), mix(color.1), mix(color.2))
}

/// Single points are seen by their dots only.
fn has_dots(curve: &Curve) -> bool {
    let points: usize = curve.lines.iter().map(Vec::len).sum();
    points == curve.lines.len() || (curve.kind == Kind::Eval && points <= MOST_DOTS)
}

/// The end of a path tells more than its beginning.
fn short(name: &str) -> String {
    let len = name.chars().count();
    match len > LONGEST_NAME {
        true => "…".chars().chain(name.chars().skip(len - LONGEST_NAME + 1)).collect(),
        false => name.to_owned(),
    }
}

/// On the right, where curves are not: below if they end high, else above.
fn legend_place(panel: &Panel, y: &Axis) -> SeriesLabelPosition {
    let last = panel.curves.iter().filter_map(|curve| curve.lines.last()?.last());
    let places: Vec<f64> = last.map(|(_, value)| y.place(*value)).collect();
    let mean = places.iter().sum::<f64>() / places.len() as f64;
    match mean > (y.range.start + y.range.end) / 2.0 {
        true => SeriesLabelPosition::LowerRight,
        false => SeriesLabelPosition::UpperRight,
    }
}
