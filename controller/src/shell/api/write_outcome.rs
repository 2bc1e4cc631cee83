//! Pure: the API server's response → if and when to try again, and the write error for users.

use crate::model::object::WriteError;

/// Outcome of one write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WriteOutcome {
    /// The object is now as desired.
    Done,
    /// The object has changed or was created since it was read: read it and try again.
    Conflict,
    /// The object does not exist: forget it and try again.
    NotFound,
    /// Try again later, after growing delays.
    Retry(Option<WriteError>),
    /// Try again after this number of seconds, as the API server asks.
    RetryAfter(u32),
    /// No attempt can succeed until something else changes; try again rarely.
    Refused(WriteError),
    /// The API server was not asked: it cannot write this part of this object, for this reason.
    Unsupported(WriteError),
    /// The same content was written too often: wait this number of milliseconds.
    Repeated(u64),
    /// Writing has become pointless: the namespace terminates, or this replica is no longer the leader.
    Abandoned,
}

impl WriteOutcome {
    /// Returns the value of the metrics' label `outcome`.
    pub fn label(&self) -> &'static str {
        match self {
            Self::Done => "done",
            Self::Conflict => "conflict",
            Self::NotFound => "missing",
            Self::Retry(_) => "retry",
            Self::RetryAfter(_) => "throttled",
            Self::Refused(_) => "refused",
            Self::Unsupported(_) => "unsupported",
            Self::Repeated(_) => "repeated",
            Self::Abandoned => "pointless",
        }
    }
}

/// A response of the API server; a broken connection has code 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ApiResponse<'a> {
    /// HTTP status code of the response.
    pub code: u16,
    /// Explanation in one line.
    pub message: &'a str,
    /// Reason of the first cause in the details.
    pub cause: &'a str,
    /// Seconds to wait before the next attempt; 0 if the response does not state any.
    pub retry_after: u32,
}

/// Returns the outcome of a response that is not a success.
pub fn classify_response(response: ApiResponse<'_>) -> WriteOutcome {
    let error = |reason| WriteError { reason, message: response.message.to_owned() };
    match response.code {
        404 => WriteOutcome::NotFound,
        409 => WriteOutcome::Conflict,
        // The message is checked too, in case the details name no cause.
        403 if response.cause == "NamespaceTerminating"
            || response.message.contains("is being terminated") =>
        {
            WriteOutcome::Abandoned
        }
        // A quota may be raised or become free at any time, so try again as after any other 403.
        403 if response.message.contains("exceeded quota") => {
            WriteOutcome::Retry(Some(error("QuotaExceeded")))
        }
        401 | 403 => WriteOutcome::Retry(Some(error("Forbidden"))),
        429 => WriteOutcome::RetryAfter(response.retry_after.max(1)),
        400 | 413 | 415 | 422 => WriteOutcome::Refused(error("Invalid")),
        500.. if response.retry_after > 0 => WriteOutcome::RetryAfter(response.retry_after),
        _ => WriteOutcome::Retry(None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_response_has_its_outcome() {
        let response = |code, message| ApiResponse { code, message, cause: "", retry_after: 0 };
        let error = |reason, message: &str| WriteError { reason, message: message.to_owned() };
        let quota = "pods \"a\" is forbidden: exceeded quota: small, requested: cpu=1";
        let message = "namespace x because it is being terminated";
        let table = [
            (response(404, ""), WriteOutcome::NotFound),
            (response(409, ""), WriteOutcome::Conflict),
            (response(403, quota), WriteOutcome::Retry(Some(error("QuotaExceeded", quota)))),
            (response(403, message), WriteOutcome::Abandoned),
            (
                ApiResponse { cause: "NamespaceTerminating", ..response(403, "no") },
                WriteOutcome::Abandoned,
            ),
            (response(403, "no"), WriteOutcome::Retry(Some(error("Forbidden", "no")))),
            (response(422, "bad"), WriteOutcome::Refused(error("Invalid", "bad"))),
            (ApiResponse { retry_after: 7, ..response(429, "") }, WriteOutcome::RetryAfter(7)),
            (response(429, ""), WriteOutcome::RetryAfter(1)),
            (response(503, ""), WriteOutcome::Retry(None)),
            (ApiResponse { retry_after: 2, ..response(503, "") }, WriteOutcome::RetryAfter(2)),
            (response(0, "connection refused"), WriteOutcome::Retry(None)),
        ];
        for (response, expected) in table {
            assert_eq!(classify_response(response), expected, "{response:?}");
        }
    }
}
