//! Deletion of objects with requests in flight: each request gets its whole response.

use serde_json::Value;
use tests::installed_cluster::{HELLO_CONTAINER, RouseCluster, service_manifest};
use tests::mounted_app::MountedApp;
use tests::streaming_exchange::StreamingExchange;
use tests::test_cluster::TestCluster;

/// Services, named by the path of their requests, each with the annotations for that path.
const PATHS: [(&str, &str); 2] = [("direct", ""), ("activator", ", rouse.dev/path: activator")];
const NAMES: [&str; 2] = [PATHS[0].0, PATHS[1].0];
/// Annotation that keeps one pod awake.
const AWAKE: &str = ", autoscaling.knative.dev/min-scale: \"1\"";
/// Parts of each body: one is echoed before the deletion, the other is sent after it.
const FIRST: &str = "first\n";
const SECOND: &str = "second\n";
/// WebSocket close frame with code 1001, which `app.c` sends on SIGTERM.
const CLOSE_FRAME: [u8; 4] = [0x88, 2, 3, 0xe9];

/// A request in flight, whose first part has been echoed.
pub(super) struct InFlightRequest {
    description: String,
    exchange: StreamingExchange,
}

impl InFlightRequest {
    fn new(cluster: &TestCluster, description: String, exchange: StreamingExchange) -> Self {
        cluster.wait(&format!("the first part of {description}"), || {
            (exchange.body() == FIRST.as_bytes()).then_some(())
        });
        Self { description, exchange }
    }

    /// Sends the second part, and asserts that both arrive and the exchange ends well.
    fn finish(mut self, cluster: &TestCluster) {
        self.exchange.send_part(SECOND);
        self.exchange.end_body();
        self.expect_end(cluster, SECOND.as_bytes());
    }

    fn expect_end(mut self, cluster: &TestCluster, last: &[u8]) {
        let description = &self.description;
        let status =
            cluster.wait(&format!("the end of {description}"), || self.exchange.exit_status());
        let body = self.exchange.body();
        let text = String::from_utf8_lossy(&body);
        assert_eq!(body, [FIRST.as_bytes(), last].concat(), "{description}: {status}: {text}");
        assert!(status.success(), "{description}: {status}");
    }
}

/// Opens a request of each kind to `host`, in flight at a pod of the service `name`.
fn open_requests(
    rouse: &RouseCluster,
    namespace: &str,
    name: &str,
    host: &str,
) -> Vec<InFlightRequest> {
    let client = rouse.client_on("node1");
    let (url, client_addresses) = (rouse.service_url(namespace, host), client.addresses());
    // `x-peer` is the address that the pod sees: the client's on the direct path, otherwise that of an activator. Until
    // its first pod is known to all nodes, every service is on the activator path.
    rouse.cluster.wait(&format!("the {name} path"), || {
        let peer = client.get(&url).header("x-peer").to_owned();
        (!peer.is_empty() && client_addresses.contains(&peer) == (name == "direct")).then_some(())
    });
    let upload = |version: &str| {
        let mut exchange = StreamingExchange::upload(client, &format!("{url}/echo"), version);
        exchange.send_part(FIRST);
        exchange
    };
    let requests = [
        ("HTTP/1.1", upload("--http1.1")),
        ("HTTP/2", upload("--http2-prior-knowledge")),
        ("upgraded", open_tunnel(rouse, &url, host)),
    ];
    let in_flight = |(kind, exchange): (&str, StreamingExchange)| {
        let request = InFlightRequest::new(&rouse.cluster, format!("{kind} by {name}"), exchange);
        let peer = request.exchange.header("x-peer");
        assert_eq!(
            client_addresses.contains(&peer),
            name == "direct",
            "{} came from {peer}",
            request.description
        );
        request
    };
    requests.into_iter().map(in_flight).collect()
}

/// Opens an upgraded connection to the service whose address is in `url`.
fn open_tunnel(rouse: &RouseCluster, url: &str, host: &str) -> StreamingExchange {
    let address = format!("{}:80", url.trim_start_matches("http://"));
    let args = [env!("CARGO_BIN_EXE_tunnel"), &address, host, "/upgrade"];
    let mut exchange = StreamingExchange::start(rouse.client_on("node1").command(&args));
    // Bytes that are sent before the upgrade are no part of the upgraded connection.
    rouse
        .cluster
        .wait("an upgraded connection", || (!exchange.header("x-peer").is_empty()).then_some(()));
    exchange.send_part(FIRST);
    exchange
}

/// Opens requests to both services. `tag_prefix` is the part of their hosts that names a tag, such as `old-`; it may be
/// empty.
fn open_all(rouse: &RouseCluster, namespace: &str, tag_prefix: &str) -> Vec<InFlightRequest> {
    let open = |name: &str| open_requests(rouse, namespace, name, &format!("{tag_prefix}{name}"));
    NAMES.into_iter().flat_map(open).collect()
}

pub(super) fn finish_all(rouse: &RouseCluster, requests: Vec<InFlightRequest>) {
    requests.into_iter().for_each(|it| it.finish(&rouse.cluster));
}

/// Manifests of both services; `appendix` appends to each of them.
fn manifests(container: &str, appendix: impl Fn(&str) -> String) -> String {
    let manifest = |(name, path): (&str, &str)| {
        service_manifest(name, &format!("{AWAKE}{path}"), container) + &appendix(name)
    };
    PATHS.map(manifest).join("---\n")
}

fn delete_all(rouse: &RouseCluster, namespace: &str, kind: &str) {
    let args = ["delete", kind, "--namespace", namespace, "--wait=false"];
    rouse.cluster.kubectl(&[&args[..], &NAMES].concat()).expect("they may be deleted");
}

/// Values of the metadata field `key` of all objects of a kind; `None` without a response.
pub(super) fn metadata_values(
    rouse: &RouseCluster,
    namespace: &str,
    kind: &str,
    key: &str,
) -> Option<Vec<String>> {
    let list = rouse.cluster.get(&[kind, "--namespace", namespace]);
    let value_of = |it: &Value| it["metadata"][key].as_str().map(str::to_owned);
    Some(list["items"].as_array()?.iter().filter_map(value_of).collect())
}

/// Uids of all pods.
fn pod_uids(rouse: &RouseCluster, namespace: &str) -> Vec<String> {
    rouse.cluster.wait("a list of pods", || metadata_values(rouse, namespace, "pods", "uid"))
}

/// Waits until each of these pods, given by uid, has a deletion timestamp, because its owner has gone.
fn wait_terminating(rouse: &RouseCluster, namespace: &str, pods: &[String]) {
    rouse.cluster.wait("the pods to terminate", || {
        let list = rouse.cluster.get(&["pods", "--namespace", namespace]);
        let is_running = |it: &&Value| it["metadata"]["deletionTimestamp"].is_null();
        let running: Vec<&Value> = list["items"].as_array()?.iter().filter(is_running).collect();
        let is_listed = |it: &&Value| pods.iter().any(|uid| it["metadata"]["uid"] == uid.as_str());
        (!running.iter().any(is_listed)).then_some(())
    });
}

/// Waits until these pods, which have no requests left, are gone.
fn wait_gone(rouse: &RouseCluster, namespace: &str, pods: &[String]) {
    rouse.cluster.wait("the pods to be gone", || {
        let uids = metadata_values(rouse, namespace, "pods", "uid")?;
        (!pods.iter().any(|it| uids.contains(it))).then_some(())
    });
}

/// Waits until the gateway responds with 404 for the host.
fn wait_not_found(rouse: &RouseCluster, namespace: &str, host: &str) {
    let host = format!("{host}.{namespace}.example.com");
    rouse.cluster.wait(&format!("{host} to lead nowhere"), || {
        (rouse.get_through_gateway(&host, "/", &[]).status == 404).then_some(())
    });
}

#[test]
fn requests_outlive_their_service() {
    let rouse = RouseCluster::shared();
    let namespace = rouse.namespace("no-service");
    let namespace = &namespace.name;
    rouse.apply_until_ready(namespace, &manifests(HELLO_CONTAINER, |_| String::new()));
    let pods = pod_uids(&rouse, namespace);
    let in_flight = open_all(&rouse, namespace, "");
    delete_all(&rouse, namespace, "ksvc");
    wait_terminating(&rouse, namespace, &pods);
    NAMES.iter().for_each(|name| wait_not_found(&rouse, namespace, name));
    finish_all(&rouse, in_flight);
    wait_gone(&rouse, namespace, &pods);
}

/// The controller creates the Configuration again for the service, and the pods of the first one end.
#[test]
fn requests_outlive_the_configuration_of_their_service() {
    let rouse = RouseCluster::shared();
    let namespace = rouse.namespace("no-config");
    let namespace = &namespace.name;
    rouse.apply_until_ready(namespace, &manifests(HELLO_CONTAINER, |_| String::new()));
    let pods = pod_uids(&rouse, namespace);
    let in_flight = open_all(&rouse, namespace, "");
    delete_all(&rouse, namespace, "configuration");
    wait_terminating(&rouse, namespace, &pods);
    finish_all(&rouse, in_flight);
    wait_gone(&rouse, namespace, &pods);
}

/// The controller creates the Route again, with other Services; the addresses of the first one become invalid.
#[test]
fn requests_outlive_the_route_of_their_service() {
    let rouse = RouseCluster::shared();
    let namespace = rouse.namespace("no-route");
    let namespace = &namespace.name;
    rouse.apply_until_ready(namespace, &manifests(HELLO_CONTAINER, |_| String::new()));
    let service_uid = |name: &str| {
        let service = rouse.cluster.get(&["service", "--namespace", namespace, name]);
        service["metadata"]["uid"].as_str().map(str::to_owned)
    };
    let before = NAMES.map(service_uid);
    assert!(before.iter().all(Option::is_some), "{before:?}");
    let in_flight = open_all(&rouse, namespace, "");
    delete_all(&rouse, namespace, "route");
    for (name, before) in NAMES.into_iter().zip(before) {
        rouse.cluster.wait(&format!("another Service {name}"), || {
            service_uid(name).filter(|it| before.as_ref() != Some(it))
        });
    }
    finish_all(&rouse, in_flight);
}

/// Traffic block that sends all requests to the latest revision.
const LATEST_TRAFFIC: &str = "  traffic:\n  - {latestRevision: true, percent: 100}\n";

/// Container of the second revision.
fn second_container() -> String {
    format!("{HELLO_CONTAINER}, env: [{{name: VERSION, value: \"2\"}}]")
}

fn old_revision(service: &str) -> String {
    format!("{service}-00001")
}

/// Waits until the first of the two revisions of each service is deleted.
pub(super) fn wait_old_revision_deleted(rouse: &RouseCluster, namespace: &str) {
    let old = NAMES.map(old_revision);
    rouse.cluster.wait("the old Revisions to be gone", || {
        let names = metadata_values(rouse, namespace, "revisions", "name")?;
        (!old.iter().any(|it| names.contains(it))).then_some(())
    });
}

/// Removes the tag, the only reference to the first revisions.
pub(super) fn remove_old_tag(rouse: &RouseCluster, namespace: &str) {
    rouse.apply_until_ready(
        namespace,
        &manifests(&second_container(), |_| LATEST_TRAFFIC.to_owned()),
    );
}

/// Waits until `is_unreferenced` returns a value for each of the first revisions.
pub(super) fn wait_old_revisions(
    rouse: &RouseCluster,
    is_unreferenced: impl Fn(&str) -> Option<()>,
) {
    for name in NAMES.map(old_revision) {
        rouse.cluster.wait(&format!("{name} to be unreferenced"), || is_unreferenced(&name));
    }
}

/// Returns a value if the revision is in reserve.
pub(super) fn find_in_reserve(rouse: &RouseCluster, namespace: &str, name: &str) -> Option<()> {
    let revision = rouse.cluster.get(&["revision", "--namespace", namespace, name]);
    let state = &revision["metadata"]["labels"]["serving.knative.dev/routingState"];
    (state == "reserve").then_some(())
}

/// Opens requests at the first of two revisions, which is reachable only by the tag `old`.
pub(super) fn open_at_old_revision(rouse: &RouseCluster, namespace: &str) -> Vec<InFlightRequest> {
    let tagged = |name: &str| {
        format!("{LATEST_TRAFFIC}  - {{revisionName: {}, tag: old}}\n", old_revision(name))
    };
    rouse.apply_until_ready(namespace, &manifests(HELLO_CONTAINER, |_| LATEST_TRAFFIC.to_owned()));
    rouse.apply_until_ready(namespace, &manifests(&second_container(), tagged));
    open_all(rouse, namespace, "old-")
}

/// The tag is the only reference to the old Revision.
#[test]
fn requests_outlive_the_tag_that_they_were_sent_to() {
    let rouse = RouseCluster::shared();
    let namespace = rouse.namespace("no-tag");
    let namespace = &namespace.name;
    let in_flight = open_at_old_revision(&rouse, namespace);
    remove_old_tag(&rouse, namespace);
    wait_old_revisions(&rouse, |name| find_in_reserve(&rouse, namespace, name));
    NAMES.iter().for_each(|name| wait_not_found(&rouse, namespace, &format!("old-{name}")));
    finish_all(&rouse, in_flight);
}

/// An older Revision with a tag as its only reference is deleted on its own.
#[test]
fn requests_outlive_their_revision() {
    let rouse = RouseCluster::shared();
    let namespace = rouse.namespace("no-revision");
    let namespace = &namespace.name;
    let in_flight = open_at_old_revision(&rouse, namespace);
    let old = NAMES.map(old_revision);
    let mut args = vec!["delete", "revision", "--namespace", namespace, "--wait=false"];
    args.extend(old.iter().map(String::as_str));
    rouse.cluster.kubectl(&args).expect("they may be deleted");
    wait_old_revision_deleted(&rouse, namespace);
    finish_all(&rouse, in_flight);
}

/// Kubernetes deletes all objects of a namespace in any order; the kubelet then ends the pods.
#[test]
fn requests_outlive_their_namespace() {
    let rouse = RouseCluster::shared();
    let namespace = rouse.namespace("no-namespace");
    let namespace = &namespace.name;
    rouse.apply_until_ready(namespace, &manifests(HELLO_CONTAINER, |_| String::new()));
    let pods = pod_uids(&rouse, namespace);
    let in_flight = open_all(&rouse, namespace, "");
    let args = ["delete", "namespace", namespace, "--wait=false"];
    rouse.cluster.kubectl(&args).expect("it may be deleted");
    wait_terminating(&rouse, namespace, &pods);
    finish_all(&rouse, in_flight);
    wait_gone(&rouse, namespace, &pods);
}

/// An upgraded connection keeps its pod for a minute; then the application gets SIGTERM and closes it gracefully.
#[test]
#[ignore = "takes more than a minute: --long"]
fn a_websocket_of_a_deleted_service_is_closed_by_its_application() {
    let rouse = RouseCluster::shared();
    let namespace = rouse.namespace("close-frame");
    let namespace = &namespace.name;
    let app = MountedApp::new(&rouse, namespace);
    let yaml =
        PATHS.map(|(name, path)| app.service(name, &format!("{AWAKE}{path}"), "tunnel=8080"));
    app.apply(&rouse, namespace, &yaml.join("---\n"));
    NAMES.iter().for_each(|name| drop(rouse.wait_ready(namespace, "ksvc", name)));
    let pods = pod_uids(&rouse, namespace);
    let client_addresses = rouse.client_on("node1").addresses();
    let open = NAMES.map(|name| {
        let description = format!("the WebSocket by {name}");
        // An early connection takes the activator path, so it is opened again until it takes the wanted one.
        rouse.cluster.wait(&description, || {
            let exchange = open_tunnel(&rouse, &rouse.service_url(namespace, name), name);
            let request = InFlightRequest::new(&rouse.cluster, description.clone(), exchange);
            (client_addresses.contains(&request.exchange.header("x-peer")) == (name == "direct"))
                .then_some(request)
        })
    });
    delete_all(&rouse, namespace, "ksvc");
    wait_terminating(&rouse, namespace, &pods);
    open.into_iter().for_each(|it| it.expect_end(&rouse.cluster, &CLOSE_FRAME));
    wait_gone(&rouse, namespace, &pods);
}
