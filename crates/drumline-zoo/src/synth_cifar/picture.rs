//! Draws one picture: a shape or pattern in two colours, with lighting and noise.

use std::f32::consts::{PI, SQRT_2};

use super::between;
use drumline::data::SampleRng;

const SIDE: usize = 32;

/// Red, green and blue, each 32×32, rows from the top.
pub(super) struct Picture {
    planes: [[u8; SIDE * SIDE]; 3],
}

/// The random geometry of a picture.
struct Form {
    centre: (f32, f32),
    angle: f32,
    /// The radius of a shape.
    radius: f32,
    /// The period and phase of a pattern.
    period: f32,
    phase: (f32, f32),
    /// The direction of a diagonal: 1 or -1.
    hand: f32,
}

impl Form {
    fn draw(rng: &mut SampleRng) -> Self {
        Self {
            centre: (between(rng, 10.0, 21.0), between(rng, 10.0, 21.0)),
            angle: between(rng, -0.2, 0.2),
            radius: between(rng, 8.0, 12.0),
            period: between(rng, 6.0, 10.0),
            phase: (between(rng, 0.0, 2.0 * PI), between(rng, 0.0, 2.0 * PI)),
            hand: if rng.chance(0.5) { 1.0 } else { -1.0 },
        }
    }

    /// The covered part of a pixel, from 0 to 1.
    fn cover(&self, class: usize, x: f32, y: f32) -> f32 {
        let (sin, cos) = self.angle.sin_cos();
        let (x, y) = (x - self.centre.0, y - self.centre.1);
        let (u, v) = (cos * x + sin * y, cos * y - sin * x);
        let covered = if class < 5 { -self.outside(class, u, v) } else { self.wave(class, u, v) };
        (0.5 + covered).clamp(0.0, 1.0)
    }

    /// The distance to the edge of the shape in pixels; negative inside.
    fn outside(&self, class: usize, u: f32, v: f32) -> f32 {
        let radius = self.radius;
        let bar = |along: f32, across: f32| (along.abs() - radius).max(across.abs() - 0.3 * radius);
        match class {
            0 => u.hypot(v) - radius,
            1 => u.abs().max(v.abs()) - 0.85 * radius,
            2 => v.max(0.866 * u.abs() - 0.5 * v) - 0.6 * radius,
            3 => (u.hypot(v) - 0.8 * radius).abs() - 0.2 * radius,
            _ => bar(u, v).min(bar(v, u)),
        }
    }

    /// The value of the pattern's wave, steep enough for clear edges.
    fn wave(&self, class: usize, u: f32, v: f32) -> f32 {
        let wave = |along: f32, phase: f32| (2.0 * PI * along / self.period + phase).sin();
        let (across, down) = (wave(u, self.phase.0), wave(v, self.phase.1));
        2.0 * match class {
            5 => down,
            6 => across,
            7 => wave((u + self.hand * v) / SQRT_2, self.phase.0),
            8 => across * down * 2.0,
            _ => across + down - 0.9,
        }
    }
}

/// The two colours, and a light from one side.
struct Paint {
    colours: [[f32; 3]; 2],
    light: (f32, f32),
}

impl Paint {
    /// Draws colours that differ by at least 70 on average.
    fn draw(class: usize, rng: &mut SampleRng) -> Self {
        let light = (between(rng, -1.0, 1.0), between(rng, -1.0, 1.0));
        loop {
            let ground: [f32; 3] = std::array::from_fn(|_| between(rng, 20.0, 235.0));
            let figure: [f32; 3] =
                std::array::from_fn(|channel| 0.5 * (tint(class, channel) + between(rng, 20.0, 235.0)));
            let apart: f32 = ground.iter().zip(figure).map(|(ground, figure)| (ground - figure).abs()).sum();
            if apart >= 3.0 * 70.0 {
                return Self { colours: [ground, figure], light };
            }
        }
    }
}

/// The colour to which a class tends: a hint, but not enough to identify the class.
fn tint(class: usize, channel: usize) -> f32 {
    127.0 + 110.0 * (2.0 * PI * (class as f32 / 10.0 + channel as f32 / 3.0)).cos()
}

impl Picture {
    pub(super) fn draw(class: usize, rng: &mut SampleRng) -> Self {
        let (form, paint) = (Form::draw(rng), Paint::draw(class, rng));
        let mut picture = Self { planes: [[0; SIDE * SIDE]; 3] };
        for place in 0..SIDE * SIDE {
            let (x, y) = ((place % SIDE) as f32, (place / SIDE) as f32);
            let cover = form.cover(class, x, y);
            let light = paint.light.0 * (x - 15.5) + paint.light.1 * (y - 15.5);
            for (channel, plane) in picture.planes.iter_mut().enumerate() {
                let [ground, figure] = paint.colours.map(|colour| colour[channel]);
                let noise = between(rng, -16.0, 16.0);
                plane[place] = (ground + (figure - ground) * cover + light + noise).clamp(0.0, 255.0) as u8;
            }
        }
        picture
    }

    pub(super) fn bytes(&self) -> impl Iterator<Item = u8> {
        self.planes.iter().flatten().copied()
    }
}
