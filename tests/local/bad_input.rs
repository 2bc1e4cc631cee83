//! Messages to users for wrong manifests and images, and responses to requests meanwhile.

use std::net::SocketAddr;
use std::thread;

use tests::http_client::get;
use tests::node_load::{LoadPlan, lost_requests, with_load};
use tests::rouse_node::RouseNode;
use tests::scenarios;
use tests::wait::wait_for;

/// Manifest of a sleeping service whose requests wait at most 4 s; `containers` is a list in YAML's short form.
fn manifest(name: &str, containers: &str) -> String {
    format!(
        "apiVersion: serving.knative.dev/v1
kind: Service
metadata: {{ name: {name} }}
spec:
  template:
    metadata:
      annotations: {{ autoscaling.knative.dev/initial-scale: \"0\", autoscaling.knative.dev/window: 6s }}
    spec: {{ timeoutSeconds: 4, containers: {containers} }}
"
    )
}

/// Container of the sample with additional fields.
fn hello_container(extra_yaml: &str) -> String {
    format!("{{ image: \"dev.local/hello:v1\"{extra_yaml} }}")
}

/// Manifest as of [`manifest`] whose requests wait at most a minute: a pod of a busy machine takes long to start.
fn patient_manifest(name: &str, containers: &str) -> String {
    manifest(name, containers).replace("timeoutSeconds: 4", "timeoutSeconds: 60")
}

/// Asserts that a message is one line, contains all `message_parts`, and is visible to users.
fn check_message(node: &RouseNode, service: &str, message: &str, message_parts: &[&str]) {
    for text_part in message_parts {
        assert!(message.contains(text_part), "{service}: {text_part:?} in {message:?}");
    }
    assert!(!message.trim().contains('\n'), "{service}: one line: {message:?}");
    // A pod that fails again changes the message. So it is read again, at the time of each description.
    wait_for(&format!("a description of {service} with a message like {message:?}"), || {
        let newest = node.stored_condition("services", service, "Ready").message;
        let described = node.run_rouse(&["describe", "ksvc", service]);
        let is_shown = |message: &str| {
            message_parts.iter().all(|it| message.contains(it)) && described.contains(message)
        };
        (is_shown(message) || is_shown(&newest)).then_some(())
    });
}

#[test]
fn wrong_manifests_and_images_get_reasons_and_their_requests_end() {
    let node = RouseNode::start("bad-input");
    scenarios::run_at_once(
        &node,
        &scenarios![
            a_manifest_that_cannot_be_used_gets_a_reason_and_becomes_ready_once_it_is_corrected,
            a_pod_that_never_becomes_ready_gets_a_reason_and_its_requests_end_at_their_deadline,
            a_port_in_use_is_named_and_its_container_does_not_serve_for_the_other,
        ],
    );
}

fn a_manifest_that_cannot_be_used_gets_a_reason_and_becomes_ready_once_it_is_corrected(
    node: &RouseNode,
) {
    let cases: [(&str, String, &[&str]); 4] = [
        ("field", hello_container(", comand: [x]"), &["unknown field", "containers[0].comand"]),
        (
            "type",
            hello_container(", ports: [{ containerPort: http }]"),
            &["wrong type", "containerPort"],
        ),
        ("image", "{ name: web }".to_owned(), &["missing field", "containers[0].image"]),
        (
            "ports",
            format!("{0}, {0}", hello_container(", ports: [{ containerPort: 8080 }]")),
            &["more than one container port", "Only a single port is allowed"],
        ),
    ];
    for (service, containers, message_parts) in &cases {
        let (_, printed) = node.apply(&manifest(service, &format!("[{containers}]")));
        for text_part in *message_parts {
            assert!(
                printed.contains(text_part),
                "{service}: {text_part:?} in the output of apply: {printed:?}"
            );
        }
        let refused = wait_for("a condition", || {
            let ready = node.condition("ksvc", service, "Ready");
            (ready.status == "False").then_some(ready)
        });
        assert_eq!(refused.reason, "InvalidManifest", "{service}");
        check_message(node, service, &refused.message, message_parts);
        let row = node.run_rouse(&["get", "ksvc", service, "--no-headers"]);
        assert!(row.contains("False   InvalidManifest"), "{row}");
    }
    let first = node.condition("ksvc", "type", "Ready").message;
    assert!(!first.contains("missing"), "nothing is missing where a type is wrong: {first:?}");
    for (service, ..) in &cases {
        assert!(node.apply(&patient_manifest(service, &format!("[{}]", hello_container("")))).0);
        let address = node.wait_ready(service);
        let response = node.in_client_netns(|| get(address, service, "/")).expect("a response");
        assert_eq!(response.status, 200, "{service}: {response:?}");
    }
}

/// An error in a service, with allowed status codes of its requests and the revision's condition.
struct InvalidServiceCase {
    service: &'static str,
    container: String,
    allowed_statuses: &'static [u16],
    reason: &'static str,
    message_parts: &'static [&'static str],
}

fn cases() -> [InvalidServiceCase; 5] {
    let env = |name: &str, value: &str| {
        hello_container(&format!(", env: [{{ name: {name}, value: \"{value}\" }}]"))
    };
    let probe = ", readinessProbe: { httpGet: { path: /ready } }";
    [
        InvalidServiceCase {
            service: "absent",
            container: "{ image: \"dev.local/absent:v1\" }".to_owned(),
            allowed_statuses: &[503, 504],
            reason: "ImagePullBackOff",
            message_parts: &["dev.local/absent:v1", "check its name and tag"],
        },
        InvalidServiceCase {
            service: "exits",
            container: env("HELLO_EXIT", "3"),
            allowed_statuses: &[503, 504],
            reason: "ExitCode3",
            message_parts: &["code 3", "HELLO_EXIT asks for exit code 3"],
        },
        InvalidServiceCase {
            service: "command",
            container: hello_container(", command: [/no/such]"),
            allowed_statuses: &[503, 504],
            reason: "ExitCode128",
            // The rest of the message comes from the runtime.
            message_parts: &["/no/such"],
        },
        InvalidServiceCase {
            service: "deaf",
            container: env("HELLO_LISTEN", "never"),
            allowed_statuses: &[504],
            reason: "ContainerNotReady",
            message_parts: &["nothing listens on port 8080"],
        },
        InvalidServiceCase {
            service: "unready",
            container: hello_container(&format!(
                ", env: [{{ name: HELLO_READY_AFTER_MS, value: never }}]{probe}"
            )),
            allowed_statuses: &[504],
            reason: "ContainerNotReady",
            message_parts: &["readiness probe failed", "GET /ready answered 503"],
        },
    ]
}

fn a_pod_that_never_becomes_ready_gets_a_reason_and_its_requests_end_at_their_deadline(
    node: &RouseNode,
) {
    let slow_manifest = patient_manifest("slow", &format!("[{}]", hello_container("")));
    assert!(node.apply(&slow_manifest).0);
    let slow_address = node.wait_ready("slow");
    let cases = cases();
    let addresses: Vec<SocketAddr> = cases
        .iter()
        .map(|case| {
            assert!(node.apply(&manifest(case.service, &format!("[{}]", case.container))).0);
            node.wait_ready(case.service)
        })
        .collect();
    let ended = std::sync::Mutex::new(Vec::new());
    let send_request = |service: &'static str, to, path: &str| {
        let response = node.in_client_netns(|| get(to, service, path)).expect(service);
        ended.lock().expect("no panic").push(service);
        response
    };
    thread::scope(|scope| {
        let send_request = &send_request;
        // The deadline of this request is far: requests that end before it have not waited for long.
        let slow_request = scope.spawn(move || send_request("slow", slow_address, "/?sleep=20000"));
        let threads: Vec<_> = cases
            .iter()
            .zip(&addresses)
            .map(|(case, to)| (case, scope.spawn(move || send_request(case.service, *to, "/"))))
            .collect();
        for (case, thread) in threads {
            let response = thread.join().expect("a response");
            let is_allowed = case.allowed_statuses.contains(&response.status);
            assert!(is_allowed, "{}: {response:?}", case.service);
        }
        assert_eq!(slow_request.join().expect("a response").status, 200);
    });
    assert_eq!(ended.lock().expect("no panic").last(), Some(&"slow"), "the others end before it");
    thread::scope(|scope| {
        for (case, address) in cases.iter().zip(addresses) {
            scope.spawn(move || check_reason(node, case, address));
        }
    });
}

/// Asserts that a service shows the reason for which it has no ready pod, and that no pod answers its requests.
fn check_reason(node: &RouseNode, case: &InvalidServiceCase, target: SocketAddr) {
    let (host, path) = (case.service.into(), "/".into());
    let plan = LoadPlan { target, host, path, clients: 1, keep_alive: false };
    let revision = format!("{}-00001", case.service);
    // A new request wakes the service again if its pod has been given up meanwhile.
    let (requests, ()) = with_load(node, &plan, |_| {
        let condition = wait_for(&format!("{}'s condition", case.service), || {
            let stored = node.stored_condition("revisions", &revision, "ContainerHealthy");
            if stored.reason != case.reason {
                return None;
            }
            let healthy = node.condition("revision", &revision, "ContainerHealthy");
            let ready = node.condition("ksvc", case.service, "Ready");
            let is_same =
                ready.status == healthy.status && ready.message.contains(&healthy.message);
            (healthy.reason == case.reason && is_same).then_some(ready)
        });
        assert_ne!(condition.status, "True", "{}", case.service);
        check_message(node, case.service, &condition.message, case.message_parts);
    });
    assert_eq!(
        lost_requests(&requests).len(),
        requests.len(),
        "{}: no pod could respond",
        case.service
    );
}

fn a_port_in_use_is_named_and_its_container_does_not_serve_for_the_other(node: &RouseNode) {
    let delayed_container = hello_container(
        ", name: web, ports: [{ containerPort: 8080 }], env: [{ name: HELLO_LISTEN_DELAY_MS, value: \"2000\" }]",
    );
    // Without a port of its own, the second container listens on the sample's default port.
    let containers = format!("[{delayed_container}, {}]", hello_container(", name: side"));
    assert!(node.apply(&manifest("twice", &containers)).0);
    let target = node.wait_ready("twice");
    let plan =
        LoadPlan { target, host: "twice".into(), path: "/".into(), clients: 1, keep_alive: false };
    with_load(node, &plan, |_| {
        let condition = wait_for("a condition", || {
            let ready = node.condition("ksvc", "twice", "Ready");
            // After its first end it starts again at once, and is ready until it fails at the port again.
            (ready.status == "False" && ready.message.contains("again after")).then_some(ready)
        });
        assert_eq!(condition.reason, "RevisionFailed");
        check_message(node, "twice", &condition.message, &["code 1", "Address already in use"]);
    });
}
