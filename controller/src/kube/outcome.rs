//! Pure: the API server's answer → whether and when to try again, and what to tell people.

use super::Trouble;

/// How a write ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// As wanted.
    Done,
    /// The object has changed since it was read: read it and try again.
    Conflict,
    /// There is no such object: forget it and try again.
    Missing,
    /// Try again later, with growing patience.
    Retry(Option<Trouble>),
    /// Try again after so many seconds, as the API server asks.
    RetryAfter(u32),
    /// Trying again cannot help until something else changes; try rarely all the same.
    Refused(Trouble),
    /// The same was written too often: not before so many milliseconds have passed.
    Repeated(u64),
    /// Nothing is to be written there any more.
    Pointless,
}

impl Outcome {
    /// As metrics name it.
    pub fn label(&self) -> &'static str {
        match self {
            Self::Done => "done",
            Self::Conflict => "conflict",
            Self::Missing => "missing",
            Self::Retry(_) => "retry",
            Self::RetryAfter(_) => "throttled",
            Self::Refused(_) => "refused",
            Self::Repeated(_) => "repeated",
            Self::Pointless => "pointless",
        }
    }
}

/// What the API server answered; a connection that broke has code 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answer<'a> {
    /// HTTP status.
    pub code: u16,
    /// One word.
    pub reason: &'a str,
    /// One line.
    pub message: &'a str,
    /// The first word of detail.
    pub cause: &'a str,
    /// Seconds to wait; 0 where it does not say.
    pub retry_after: u32,
}

/// What follows from an answer that is no success.
pub fn outcome(answer: Answer<'_>) -> Outcome {
    let trouble = |reason| Trouble { reason, message: answer.message.to_owned() };
    match answer.code {
        404 => Outcome::Missing,
        409 => Outcome::Conflict,
        403 if answer.cause == "NamespaceTerminating"
            || answer.message.contains("is being terminated") =>
        {
            Outcome::Pointless
        }
        403 if answer.message.contains("exceeded quota") => {
            Outcome::Retry(Some(trouble("QuotaExceeded")))
        }
        401 | 403 => Outcome::Retry(Some(trouble("Forbidden"))),
        429 => Outcome::RetryAfter(answer.retry_after.max(1)),
        400 | 413 | 415 | 422 => Outcome::Refused(trouble("Invalid")),
        500.. if answer.retry_after > 0 => Outcome::RetryAfter(answer.retry_after),
        _ => Outcome::Retry(None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_answer_has_its_consequence() {
        let answer =
            |code, message| Answer { code, reason: "", message, cause: "", retry_after: 0 };
        let trouble = |reason, message: &str| Trouble { reason, message: message.to_owned() };
        let quota = "pods \"a\" is forbidden: exceeded quota: small, requested: cpu=1";
        let leaving = "namespace x because it is being terminated";
        let table = [
            (answer(404, ""), Outcome::Missing),
            (answer(409, ""), Outcome::Conflict),
            (answer(403, quota), Outcome::Retry(Some(trouble("QuotaExceeded", quota)))),
            (answer(403, leaving), Outcome::Pointless),
            (Answer { cause: "NamespaceTerminating", ..answer(403, "no") }, Outcome::Pointless),
            (answer(403, "no"), Outcome::Retry(Some(trouble("Forbidden", "no")))),
            (answer(422, "bad"), Outcome::Refused(trouble("Invalid", "bad"))),
            (Answer { retry_after: 7, ..answer(429, "") }, Outcome::RetryAfter(7)),
            (answer(429, ""), Outcome::RetryAfter(1)),
            (answer(503, ""), Outcome::Retry(None)),
            (Answer { retry_after: 2, ..answer(503, "") }, Outcome::RetryAfter(2)),
            (answer(0, "connection refused"), Outcome::Retry(None)),
        ];
        for (answer, expected) in table {
            assert_eq!(outcome(answer), expected, "{answer:?}");
        }
    }
}
