//! Pure: errors of kubectl that say nothing about the objects, after which the same request is sent again.

/// Parts of errors of transport. All parts of one entry occur in the message.
///
/// A busy API server, etcd, kubelet or webhook causes them, and users of kubectl try again.
const TRANSPORT_ERRORS: [&[&str]; 12] = [
    &["failed calling webhook", "context deadline exceeded"],
    &["failed calling webhook", "i/o timeout"],
    &["/containerLogs/", "context deadline exceeded"],
    &["/containerLogs/", "i/o timeout"],
    &["connection refused"],
    &["TLS handshake timeout"],
    &["http2: client connection lost"],
    &["etcdserver: request timed out"],
    &["etcdserver: leader changed"],
    &["the server is currently unable"],
    &["request did not complete within requested timeout"],
    &["unable to return a response in the time allotted"],
];

/// Parts of answers about the objects, which may quote an error of another connection.
const ANSWERS: [&str; 2] = ["denied the request", "Unable to fetch image"];

/// Returns true if the request may be sent again. A denial by admission is never sent again.
pub(crate) fn is_transport_error(error: &str) -> bool {
    let has_all = |parts: &&[&str]| parts.iter().all(|part| error.contains(part));
    !ANSWERS.iter().any(|part| error.contains(part)) && TRANSPORT_ERRORS.iter().any(has_all)
}

/// Returns true if an earlier try of these arguments has had its effect, although its response was lost.
pub(crate) fn is_done_before(args: &[&str], error: &str) -> bool {
    let reason = if args.contains(&"delete") {
        "(NotFound)"
    } else if args.contains(&"create") {
        "(AlreadyExists)"
    } else {
        return false;
    };
    let mut errors = error.lines().filter(|line| line.starts_with("Error from server")).peekable();
    errors.peek().is_some() && errors.all(|line| line.contains(reason))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SLOW_WEBHOOK: &str = "Error from server (InternalError): error when creating \"STDIN\": \
        Internal error occurred: failed calling webhook \"webhook.serving.knative.dev\": failed to call webhook: \
        Post \"https://webhook.knative-serving.svc:443/defaulting?timeout=10s\": context deadline exceeded";
    const DENIAL: &str = "Error from server (BadRequest): error when creating \"STDIN\": admission webhook \
        \"validation.webhook.serving.knative.dev\" denied the request: validation failed: must not set the field(s)";

    #[test]
    fn a_request_is_sent_again_after_an_error_of_transport_and_never_after_a_denial() {
        assert!(is_transport_error(SLOW_WEBHOOK));
        assert!(is_transport_error(
            "Unable to connect to the server: net/http: TLS handshake timeout"
        ));
        assert!(is_transport_error("Error from server: etcdserver: request timed out"));
        assert!(!is_transport_error(DENIAL));
        // One of several objects was denied.
        assert!(!is_transport_error(&format!("{SLOW_WEBHOOK}\n{DENIAL}")));
        assert!(!is_transport_error("error: timed out waiting for the condition"));
        // Without a webhook, the deadline may be the product's own.
        assert!(!is_transport_error("error: exec in container: context deadline exceeded"));
        let image =
            "RevisionFailed: Unable to fetch image: dial tcp 192.0.2.1:443: connection refused";
        assert!(!is_transport_error(image));
    }

    #[test]
    fn only_creations_and_deletions_may_be_done_before() {
        let absent = "Error from server (NotFound): pods \"a\" not found";
        let present = "Error from server (AlreadyExists): namespaces \"a\" already exists";
        assert!(is_done_before(&["delete", "pod", "a"], absent));
        assert!(is_done_before(&["create", "namespace", "a"], present));
        assert!(!is_done_before(&["delete", "pod", "a"], present));
        assert!(!is_done_before(&["patch", "pod", "a"], absent));
        assert!(!is_done_before(&["create"], &format!("{present}\n{DENIAL}")));
        assert!(!is_done_before(&["create"], "error: no objects passed to create"));
    }
}
