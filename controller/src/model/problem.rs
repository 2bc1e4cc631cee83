//! Pure: broken rules of an object, in Knative's form: `<message>: <path>`, then details.

use std::{collections::BTreeMap, fmt};

/// One broken rule, with the field that breaks it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Problem {
    /// Path of the field, such as `spec.template.spec.containers[0].image`; several are separated by `, `.
    pub path: String,
    /// Message, in Knative's words where Knative has the rule.
    pub message: String,
    /// Details, which Knative shows below the message, on a line of their own.
    pub details: Option<String>,
    /// Advice for the user, where the message gives none. Knative has no advice: only Rouse's own pages show it.
    pub advice: Option<String>,
}

impl Problem {
    /// Makes a problem that no other constructor covers.
    pub fn new(path: impl Into<String>, message: impl Into<String>) -> Self {
        Self { path: path.into(), message: message.into(), details: None, advice: None }
    }

    /// Reports that a required field is missing.
    pub fn missing(path: impl Into<String>) -> Self {
        Self::new(path, "missing field(s)")
    }

    /// Reports a field that may not be set.
    pub fn disallowed(path: impl Into<String>) -> Self {
        Self::new(path, "must not set the field(s)")
    }

    /// Reports a value that the field does not allow.
    pub fn invalid(path: impl Into<String>, value: impl fmt::Display) -> Self {
        Self::new(path, format!("invalid value: {value}"))
    }

    /// Reports a key that is not allowed at `path`.
    pub fn invalid_key(path: impl Into<String>, key: &str) -> Self {
        Self::new(path, format!("invalid key name {key:?}"))
    }

    /// Reports that none of several exclusive fields is set.
    pub fn none_set(paths: impl Into<String>) -> Self {
        Self::new(paths, "expected exactly one, got neither")
    }

    /// Reports that more than one of several exclusive fields is set.
    pub fn several_set(paths: impl Into<String>) -> Self {
        Self::new(paths, "expected exactly one, got both")
    }

    /// Reports a value out of bounds.
    pub fn out_of_bounds(
        path: impl Into<String>,
        low: impl fmt::Display,
        value: impl fmt::Display,
        high: impl fmt::Display,
    ) -> Self {
        Self::new(path, format!("expected {low} <= {value} <= {high}"))
    }

    /// Adds details, which Knative shows below the message.
    pub fn with_details(self, details: impl Into<String>) -> Self {
        Self { details: Some(details.into()), ..self }
    }

    /// Adds advice, which only Rouse's own pages show.
    pub fn with_advice(self, advice: impl Into<String>) -> Self {
        Self { advice: Some(advice.into()), ..self }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.path.as_str() {
            "" => write!(out, "{}", self.message)?,
            path => write!(out, "{}: {path}", self.message)?,
        }
        // One line holds one of them: details are Knative's own text, so they come first.
        let more = self.details.as_deref().or(self.advice.as_deref());
        more.map_or(Ok(()), |more| write!(out, " ({})", more.trim_end().replace('\n', "; ")))
    }
}

/// Formats all problems on one line, in a fixed order.
pub fn problems_line(problems: &[Problem]) -> String {
    let mut lines: Vec<String> = problems.iter().map(ToString::to_string).collect();
    lines.sort();
    lines.dedup();
    lines.join("; ")
}

/// Formats all problems as Knative's webhook does: equal messages share a line, details follow below.
///
/// knative/pkg `apis/field_error.go`: merged by message and details, sorted by both, paths sorted.
pub fn knative_message(problems: &[Problem]) -> String {
    let mut merged: BTreeMap<(&str, &str), Vec<&str>> = BTreeMap::new();
    for problem in problems {
        let details = problem.details.as_deref().unwrap_or_default();
        let paths = merged.entry((&problem.message, details)).or_default();
        paths.extend(problem.path.split(", "));
    }
    let lines = merged.into_iter().map(|((message, details), mut paths)| {
        paths.sort_unstable();
        paths.dedup();
        let head = format!("{message}: {}", paths.join(", "));
        if details.is_empty() { head } else { format!("{head}\n{details}") }
    });
    lines.collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_messages_share_a_line_and_details_stand_beneath() {
        let all = [
            Problem::missing("spec.b"),
            Problem::invalid("spec.c", 1).with_details("must be 2").with_advice("not shown"),
            Problem::missing("spec.a"),
            Problem::missing("spec.b"),
        ];
        let expected = "invalid value: 1: spec.c\nmust be 2\nmissing field(s): spec.a, spec.b";
        assert_eq!(knative_message(&all), expected);
        let expected = "invalid value: 1: spec.c (must be 2); missing field(s): spec.a; missing field(s): spec.b";
        assert_eq!(problems_line(&all), expected);
    }
}
