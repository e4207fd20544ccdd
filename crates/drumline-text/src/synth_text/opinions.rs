//! What people say about a film: an opinion, facts, or both.

use super::Opinion;
use crate::random::Random;

const THINGS: [&str; 10] =
    ["film", "plot", "acting", "music", "ending", "camera", "dialogue", "cast", "story", "scenery"];
const GOOD: [&str; 10] =
    ["good", "great", "lovely", "clever", "moving", "bright", "funny", "charming", "gripping", "fresh"];
const BAD: [&str; 10] =
    ["bad", "dull", "boring", "weak", "clumsy", "noisy", "tiresome", "flat", "confused", "stale"];
const HOW: [&str; 5] = ["very", "really", "quite", "rather", "so"];
const WERE: [&str; 6] = ["blue", "paper", "large", "printed", "numbered", "green"];
const DAYS: [&str; 7] = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"];
const TOWNS: [&str; 8] = ["Corby", "Arlen", "Weston", "Harrow", "Selby", "Linden", "Marlow", "Eden"];

/// One to three clauses, at most one of which is an opinion.
pub(super) fn draw(random: &mut Random) -> Opinion {
    let mut clauses: Vec<_> = (0..random.below(3)).map(|_| fact(random)).collect();
    let label = match random.below(3) {
        0 => {
            clauses.push(fact(random));
            "neutral"
        }
        kind => {
            let (label, clause) = opinion(kind == 1, random);
            clauses.insert(random.below(clauses.len() + 1), clause);
            label
        }
    };
    Opinion { text: format!("{} .", clauses.join(" , and ")), label }
}

fn opinion(likes_it: bool, random: &mut Random) -> (&'static str, String) {
    let denies = random.chance(0.4);
    let thing = random.choose(&THINGS);
    let word = random.choose(if likes_it != denies { &GOOD } else { &BAD });
    let how = if random.chance(0.5) { format!("{} ", random.choose(&HOW)) } else { String::new() };
    let label = if likes_it { "positive" } else { "negative" };
    (label, format!("the {thing} was {}{how}{word}", not(denies)))
}

fn fact(random: &mut Random) -> String {
    let denies = random.chance(0.4);
    match random.below(3) {
        0 => format!("the tickets were {}{}", not(denies), random.choose(&WERE)),
        1 if denies => format!("it did not run on {}", random.choose(&DAYS)),
        1 => format!("it ran on {}", random.choose(&DAYS)),
        _ if denies => format!("we did not see it in {}", random.choose(&TOWNS)),
        _ => format!("we saw it in {}", random.choose(&TOWNS)),
    }
}

fn not(denies: bool) -> &'static str {
    if denies { "not " } else { "" }
}
