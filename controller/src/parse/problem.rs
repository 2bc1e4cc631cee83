//! Pure: what is wrong with an object, in Knative's words: `<message>: <path>`, then what to do.

use std::fmt;

/// One broken rule.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Problem {
    /// Field at fault, such as `spec.template.spec.containers[0].image`.
    pub path: String,
    /// What is wrong, in Knative's words where Knative has any.
    pub message: String,
    /// What to do, where the message does not say it.
    pub advice: Option<String>,
}

impl Problem {
    /// A broken rule that no constructor below names.
    pub fn new(path: impl Into<String>, message: impl Into<String>) -> Self {
        Self { path: path.into(), message: message.into(), advice: None }
    }

    /// Something needed is not there.
    pub fn missing(path: impl Into<String>) -> Self {
        Self::new(path, "missing field(s)")
    }

    /// The field may not be set.
    pub fn disallowed(path: impl Into<String>) -> Self {
        Self::new(path, "must not set the field(s)")
    }

    /// The value makes no sense.
    pub fn invalid(path: impl Into<String>, value: impl fmt::Display) -> Self {
        Self::new(path, format!("invalid value: {value}"))
    }

    /// The value is out of bounds.
    pub fn bounds(
        path: impl Into<String>,
        low: impl fmt::Display,
        value: impl fmt::Display,
        high: impl fmt::Display,
    ) -> Self {
        Self::new(path, format!("expected {low} <= {value} <= {high}"))
    }

    /// The same with what to do.
    pub fn advise(self, advice: impl Into<String>) -> Self {
        Self { advice: Some(advice.into()), ..self }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.path.as_str() {
            "" => write!(out, "{}", self.message)?,
            path => write!(out, "{}: {path}", self.message)?,
        }
        self.advice.as_ref().map_or(Ok(()), |advice| write!(out, " ({advice})"))
    }
}

/// All of them on one line, in a fixed order.
pub fn line(problems: &[Problem]) -> String {
    let mut lines: Vec<String> = problems.iter().map(ToString::to_string).collect();
    lines.sort();
    lines.dedup();
    lines.join("; ")
}
