//! Pure: the form of a commit's subject, `area: verb object`, which a reader understands without the body.

use super::rules::{TidyFinding, error};

/// Areas that are not crates.
const AREAS: [&str; 9] =
    ["all", "bench", "cargo", "ci", "demo", "deploy", "docs", "examples", "tidy"];
/// Maximum length of a subject, which `git log --oneline` then shows whole.
const MAX_LENGTH: usize = 72;
/// Words that a reader understands only with the body.
const VAGUE_WORDS: [&str; 8] =
    ["again", "anew", "it", "nobody", "somebody", "something", "things", "whoever"];

/// Checks the subject of one commit, which `location` names. `crates` are the areas beside [`AREAS`].
pub(crate) fn check(location: &str, subject: &str, crates: &[&str]) -> Option<TidyFinding> {
    let reason = rejection_reason(subject, crates)?;
    Some(error(location, format!("`{subject}`: {reason}; write `area: verb object`")))
}

fn rejection_reason(subject: &str, crates: &[&str]) -> Option<String> {
    let Some((areas, rest)) = subject.split_once(": ") else {
        return Some("names no area".to_owned());
    };
    let is_known = |area: &&str| crates.contains(area) || AREAS.contains(area);
    if let Some(area) = areas.split(", ").find(|it| !is_known(it)) {
        return Some(format!("`{area}` is neither a crate nor one of {}", AREAS.join(", ")));
    }
    if subject.chars().count() > MAX_LENGTH {
        return Some(format!("is longer than {MAX_LENGTH} characters"));
    }
    let mut words = rest.split(|letter: char| !letter.is_alphanumeric() && letter != '\'');
    let first = words.next().unwrap_or_default();
    // No dictionary is asked: a small letter and no `-ing` rule out most mistakes.
    let is_verb = first.chars().all(char::is_lowercase) && !first.ends_with("ing");
    if !is_verb || words.next().is_none() {
        return Some("does not begin with a verb in small letters and its object".to_owned());
    }
    let vague = VAGUE_WORDS.into_iter().find(|it| rest.split_whitespace().any(|word| word == *it));
    vague.map(|word| format!("contains `{word}`, which only the body explains"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_subject_names_area_verb_and_object() {
        let is_fine = |it| check("1234567", it, &["activator", "agent"]).is_none();
        assert!(is_fine("activator: forward Expect: 100-continue to the pod"));
        assert!(is_fine("agent, activator: name the error of a full map"));
        assert!(is_fine("docs: add the glossary"));
        for refused in [
            "Leave an answer's unreadable length unread",
            "agnet: name the error",
            "agent: Name the error",
            "agent: naming the error",
            "agent: fix",
            "agent: try it again",
            "agent: name the error of a map that is as full as the kernel lets it become when a user",
        ] {
            assert!(!is_fine(refused), "{refused}");
        }
    }
}
