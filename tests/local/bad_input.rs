//! Messages to users for wrong manifests and images, and responses to requests meanwhile.

use std::net::SocketAddr;
use std::thread;

use tests::client::{LoadPlan, get, load, lost};
use tests::rouse::{RouseNode, wait};

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
fn hello(more: &str) -> String {
    format!("{{ image: \"dev.local/hello:v1\"{more} }}")
}

/// Asserts that a message is one line, contains each of `says`, and is visible to users.
fn told(node: &RouseNode, service: &str, message: &str, says: &[&str]) {
    for part in says {
        assert!(message.contains(part), "{service}: {part:?} in {message:?}");
    }
    assert!(!message.trim().contains('\n'), "{service}: one line: {message:?}");
    let described = node.rouse(&["describe", "ksvc", service]);
    assert!(described.contains(message), "{service}: {message:?} in {described}");
}

#[test]
fn a_manifest_that_cannot_be_used_says_why_and_becomes_ready_once_it_is_corrected() {
    let node = RouseNode::up("manifest");
    let cases: [(&str, String, &[&str]); 4] = [
        ("field", hello(", comand: [x]"), &["unknown field", "containers[0].comand"]),
        ("type", hello(", ports: [{ containerPort: http }]"), &["wrong type", "containerPort"]),
        ("image", "{ name: web }".to_owned(), &["missing field", "containers[0].image"]),
        (
            "ports",
            format!("{0}, {0}", hello(", ports: [{ containerPort: 8080 }]")),
            &["more than one container port", "Only a single port is allowed"],
        ),
    ];
    for (service, containers, says) in &cases {
        let (_, printed) = node.apply(&manifest(service, &format!("[{containers}]")));
        for part in *says {
            assert!(printed.contains(part), "{service}: {part:?} in what apply said: {printed:?}");
        }
        let refused = wait("a condition", || {
            let ready = node.condition("ksvc", service, "Ready");
            (ready.status == "False").then_some(ready)
        });
        assert_eq!(refused.reason, "InvalidManifest", "{service}");
        told(&node, service, &refused.message, says);
        let row = node.rouse(&["get", "ksvc", service, "--no-headers"]);
        assert!(row.contains("False   InvalidManifest"), "{row}");
    }
    let first = node.condition("ksvc", "type", "Ready").message;
    assert!(!first.contains("missing"), "nothing is missing where a type is wrong: {first:?}");
    for (service, ..) in &cases {
        assert!(node.apply(&manifest(service, &format!("[{}]", hello("")))).0);
        let to = node.wait_ready(service);
        let answer = node.inside(|| get(to, service, "/")).expect("an answer");
        assert_eq!(answer.status, 200, "{service}: {answer:?}");
    }
}

/// An error in a service, with allowed status codes of its requests and the revision's condition.
struct InvalidServiceCase {
    service: &'static str,
    container: String,
    codes: &'static [u16],
    reason: &'static str,
    says: &'static [&'static str],
}

fn cases() -> [InvalidServiceCase; 5] {
    let env = |name: &str, value: &str| {
        hello(&format!(", env: [{{ name: {name}, value: \"{value}\" }}]"))
    };
    let probe = ", readinessProbe: { httpGet: { path: /ready } }";
    [
        InvalidServiceCase {
            service: "absent",
            container: "{ image: \"dev.local/absent:v1\" }".to_owned(),
            codes: &[503, 504],
            reason: "ImagePullBackOff",
            says: &["dev.local/absent:v1", "check its name and tag"],
        },
        InvalidServiceCase {
            service: "exits",
            container: env("HELLO_EXIT", "3"),
            codes: &[503, 504],
            reason: "ExitCode3",
            says: &["code 3", "HELLO_EXIT asks for exit code 3"],
        },
        InvalidServiceCase {
            service: "command",
            container: hello(", command: [/no/such]"),
            codes: &[503, 504],
            reason: "ExitCode128",
            // The rest of the message comes from the runtime.
            says: &["/no/such"],
        },
        InvalidServiceCase {
            service: "deaf",
            container: env("HELLO_LISTEN", "never"),
            codes: &[504],
            reason: "ContainerNotReady",
            says: &["nothing listens on port 8080"],
        },
        InvalidServiceCase {
            service: "unready",
            container: hello(&format!(
                ", env: [{{ name: HELLO_READY_AFTER_MS, value: never }}]{probe}"
            )),
            codes: &[504],
            reason: "ContainerNotReady",
            says: &["readiness probe failed", "GET /ready answered 503"],
        },
    ]
}

#[test]
fn a_pod_that_never_becomes_ready_says_why_and_its_requests_end_at_their_deadline() {
    let node = RouseNode::up("unready");
    let slow = manifest("slow", &format!("[{}]", hello(""))).replace("Seconds: 4", "Seconds: 60");
    assert!(node.apply(&slow).0);
    let slow = node.wait_ready("slow");
    let cases = cases();
    let addresses: Vec<SocketAddr> = cases
        .iter()
        .map(|case| {
            assert!(node.apply(&manifest(case.service, &format!("[{}]", case.container))).0);
            node.wait_ready(case.service)
        })
        .collect();
    let ended = std::sync::Mutex::new(Vec::new());
    let ask = |service: &'static str, to, path: &str| {
        let answer = node.inside(|| get(to, service, path)).expect(service);
        ended.lock().expect("no panic").push(service);
        answer
    };
    thread::scope(|scope| {
        let ask = &ask;
        // The deadline of this request is far: requests that end before it have not waited for long.
        let slow = scope.spawn(move || ask("slow", slow, "/?sleep=15000"));
        let asked: Vec<_> = cases
            .iter()
            .zip(addresses)
            .map(|(case, to)| (case, scope.spawn(move || ask(case.service, to, "/"))))
            .collect();
        for (case, thread) in asked {
            let answer = thread.join().expect("an answer");
            assert!(case.codes.contains(&answer.status), "{}: {answer:?}", case.service);
        }
        assert_eq!(slow.join().expect("an answer").status, 200);
    });
    assert_eq!(ended.lock().expect("no panic").last(), Some(&"slow"), "the others end before it");
    for case in &cases {
        // A new request wakes the service again if its pod has been given up meanwhile.
        let to = node.cluster_ip(case.service);
        let plan =
            LoadPlan { to, host: case.service.into(), path: "/".into(), clients: 1, keep: false };
        let (sent, condition) = load(&node, &plan, |_| {
            wait(&format!("{}'s condition", case.service), || {
                let revision = format!("{}-00001", case.service);
                let healthy = node.condition("revision", &revision, "ContainerHealthy");
                let ready = node.condition("ksvc", case.service, "Ready");
                let same =
                    ready.status == healthy.status && ready.message.contains(&healthy.message);
                (healthy.reason == case.reason && same).then_some(ready)
            })
        });
        assert_ne!(condition.status, "True", "{}", case.service);
        told(&node, case.service, &condition.message, case.says);
        assert_eq!(lost(&sent).len(), sent.len(), "{}: nothing was there to answer", case.service);
    }
}

#[test]
fn a_port_that_is_in_use_is_named_and_the_container_that_took_it_does_not_answer_for_the_other() {
    let node = RouseNode::up("inuse");
    let late = hello(
        ", name: web, ports: [{ containerPort: 8080 }], env: [{ name: HELLO_LISTEN_DELAY_MS, value: \"2000\" }]",
    );
    // Without a port of its own, the second container listens on the sample's default port.
    let both = format!("[{late}, {}]", hello(", name: side"));
    assert!(node.apply(&manifest("twice", &both)).0);
    let to = node.wait_ready("twice");
    let plan = LoadPlan { to, host: "twice".into(), path: "/".into(), clients: 1, keep: false };
    let (_, condition) = load(&node, &plan, |_| {
        wait("a condition", || {
            let ready = node.condition("ksvc", "twice", "Ready");
            // After its first end it starts again at once, and is ready until it fails at the port again.
            (ready.status == "False" && ready.message.contains("again after")).then_some(ready)
        })
    });
    assert_eq!(condition.reason, "RevisionFailed");
    told(&node, "twice", &condition.message, &["code 1", "Address already in use"]);
}
