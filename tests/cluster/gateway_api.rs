//! Gateway API with upstream's own kinds: routes to services that sleep and to plain ones, statuses as users see them,
//! and what a deletion leaves.
//!
//! The first test installs the kinds, for which Rouse looks once a minute. Meanwhile services start and fall asleep.

use std::fs;
use std::sync::OnceLock;

use serde_json::{Value, json};
use tests::installed_cluster::{HELLO_CONTAINER, RouseCluster, SYSTEM_NAMESPACE, service_manifest};
use tests::test_cluster::{HELLO_IMAGE, TestCluster, find_condition, in_netns, required_variable};
use tests::tls_client::TlsClients;
use tests::tls_files::{TlsFiles, first_certificate, tls_secret};
use tokio::runtime::Builder;
use tonic::client::Grpc;
use tonic::transport::{Endpoint, Error};
use tonic::{Code, Request, Status};

use super::tls::{wait_served, wait_unserved};

/// Group of the kinds, and those of them that Rouse reads.
const GROUP: &str = "gateway.networking.k8s.io";
const KINDS: [&str; 5] =
    ["gatewayclasses", "gateways", "grpcroutes", "httproutes", "referencegrants"];
/// Name of each Gateway.
const GATEWAY: &str = "public";
/// Secret with the certificate of a Gateway's listener.
const SECRET: &str = "web";
/// Rules of the route to the services `shop`, which sleeps, and `legacy`, a plain one.
const SHOP_RULES: &str = "  - matches: [{path: {type: PathPrefix, value: /legacy}}]
    backendRefs: [{name: legacy, port: 80}]
  - matches: [{headers: [{name: x-version, value: legacy}]}]
    backendRefs: [{name: legacy, port: 80}]
  - matches: [{path: {type: PathPrefix, value: /split}}]
    backendRefs: [{name: shop, port: 80, weight: 3}, {name: legacy, port: 80, weight: 1}]
  - backendRefs: [{name: shop, port: 80}]
";
/// Paths and headers of requests, each with the service of its rule. The first one wakes `shop`.
const SHOP_REQUESTS: [(&str, &[&str], &str); 5] = [
    ("/", &[], "shop"),
    ("/legacies", &[], "shop"),
    ("/legacy/1", &[], "legacy"),
    ("/", &["x-version: legacy"], "legacy"),
    ("/", &["x-version: newest"], "shop"),
];
/// Number of requests of which `shop` gets three quarters. Its share has a standard deviation of 6.
const SPLIT_REQUESTS: usize = 200;
/// Status of a service that is healthy (`HealthCheckResponse` of grpc.health.v1).
const SERVING: i32 = 1;

/// Installs the kinds, once for all tests of this process. They stay until the cluster goes.
fn install_kinds(cluster: &TestCluster) {
    static INSTALLED: OnceLock<()> = OnceLock::new();
    INSTALLED.get_or_init(|| {
        let file = required_variable("ROUSE_GATEWAY_KINDS");
        let text = fs::read_to_string(&file).unwrap_or_else(|error| panic!("{file}: {error}"));
        let names = KINDS.map(|plural| format!("{plural}.{GROUP}"));
        let is_read = |manifest: &&str| {
            names.iter().any(|name| manifest.contains(&format!("\n  name: {name}\n")))
        };
        let manifests: Vec<&str> = text.split("\n---\n").filter(is_read).collect();
        assert_eq!(manifests.len(), names.len(), "kinds in {file}");
        // By the server: some kinds are larger than the annotation that kubectl otherwise stores them in.
        cluster
            .kubectl_with_manifest(&["apply", "--server-side"], &manifests.join("\n---\n"))
            .expect("the API server takes the kinds");
        cluster.wait_established(&names.each_ref().map(String::as_str));
    });
}

/// A Gateway with a class of its own, for the hosts below a domain of its own.
struct TestGateway<'a> {
    rouse: &'a RouseCluster,
    /// Namespace of the Gateway, which is also the name of its class.
    namespace: &'a str,
    domain: String,
}

impl<'a> TestGateway<'a> {
    /// Installs the kinds, and names the Gateway of this namespace. Its manifest is still to be applied.
    fn new(rouse: &'a RouseCluster, namespace: &'a str) -> Self {
        install_kinds(&rouse.cluster);
        Self { rouse, namespace, domain: format!("{namespace}.example.net") }
    }

    /// Manifest of the Gateway and its class. With a Secret, the Gateway has a listener of HTTPS, too.
    fn manifest(&self, secret: Option<&str>) -> String {
        let Self { namespace: class, domain, .. } = self;
        let https = secret.map(|secret| {
            format!(
                "  - name: https
    port: 443
    protocol: HTTPS
    hostname: \"*.{domain}\"
    tls: {{certificateRefs: [{{name: {secret}}}]}}
"
            )
        });
        format!(
            "apiVersion: {GROUP}/v1
kind: GatewayClass
metadata: {{name: {class}}}
spec: {{controllerName: rouse.dev/gateway}}
---
apiVersion: {GROUP}/v1
kind: Gateway
metadata: {{name: {GATEWAY}}}
spec:
  gatewayClassName: {class}
  listeners:
  - {{name: http, port: 80, protocol: HTTP, hostname: \"*.{domain}\"}}
{}",
            https.unwrap_or_default()
        )
    }

    /// Manifest of a route of this kind, whose host is its name below the domain.
    fn route_manifest(&self, kind: &str, name: &str, rules: &str) -> String {
        let host = self.host(name);
        format!(
            "apiVersion: {GROUP}/v1
kind: {kind}
metadata: {{name: {name}}}
spec:
  parentRefs: [{{name: {GATEWAY}}}]
  hostnames: [{host}]
  rules:
{rules}"
        )
    }

    /// Host with this name below the domain.
    fn host(&self, name: &str) -> String {
        format!("{name}.{}", self.domain)
    }

    fn apply(&self, manifests: &[String]) {
        let manifests = manifests.join("\n---\n");
        self.rouse.apply(self.namespace, &manifests).expect("the API server takes them");
    }

    fn get(&self, kind: &str, name: &str) -> Value {
        self.rouse.cluster.get(&[kind, "--namespace", self.namespace, name])
    }

    /// Cells that `kubectl get ARGS` prints for one object, without its age.
    fn printed_cells(&self, args: &[&str]) -> Vec<String> {
        let get = ["get", "--no-headers", "--namespace", self.namespace];
        let text = self.rouse.cluster.kubectl(&[&get[..], args].concat()).expect("it exists");
        let mut cells: Vec<String> = text.split_whitespace().map(str::to_owned).collect();
        cells.pop();
        cells
    }

    /// Condition of a route at the Gateway; null if there is none.
    fn route_condition(&self, kind: &str, name: &str, condition_type: &str) -> Value {
        let route = self.get(kind, name);
        find_condition(&json!({"status": route["status"]["parents"][0]}), condition_type)
    }

    /// Waits until a route is accepted by the Gateway, and all of its backends are found.
    fn wait_accepted(&self, kind: &str, name: &str) {
        self.rouse.cluster.wait(&format!("{kind}/{name} to be accepted"), || {
            let mut conditions = ["Accepted", "ResolvedRefs"].into_iter();
            let is_true = |it: &str| self.route_condition(kind, name, it)["status"] == "True";
            conditions.all(is_true).then_some(())
        });
    }

    /// Waits until the class is accepted, the Gateway is programmed, and each listener has this number of routes.
    fn wait_programmed(&self, routes: u64) {
        let description = format!("a programmed Gateway with {routes} routes");
        self.rouse.cluster.wait(&description, || {
            let class = self.get("gatewayclass", self.namespace);
            let gateway = self.get("gateway", GATEWAY);
            let mut listeners = gateway["status"]["listeners"].as_array()?.iter();
            let is_ready = find_condition(&class, "Accepted")["status"] == "True"
                && find_condition(&gateway, "Programmed")["status"] == "True"
                && listeners.all(|it| it["attachedRoutes"] == routes);
            is_ready.then_some(())
        });
    }

    /// Waits until a service responds to a request from outside of the cluster.
    fn wait_response(&self, host: &str, path: &str, headers: &[&str], service: &str) {
        let begin = format!("Hello from {service}-");
        self.rouse.cluster.wait(&format!("{service} at {host}{path} with {headers:?}"), || {
            let response = self.rouse.get_through_gateway(host, path, headers);
            response.body.starts_with(&begin).then_some(())
        });
    }

    /// Waits until the gateway itself responds that it does not know the host.
    fn wait_unknown(&self, host: &str) {
        self.rouse.cluster.wait(&format!("404 at {host}"), || {
            (self.rouse.get_through_gateway(host, "/", &[]).status == 404).then_some(())
        });
    }
}

impl Drop for TestGateway<'_> {
    fn drop(&mut self) {
        // All else goes with the namespace.
        let delete = ["delete", "gatewayclass", "--ignore-not-found", "--wait=false"];
        let _stays = self.rouse.cluster.kubectl(&[&delete[..], &[self.namespace]].concat());
    }
}

/// Manifest of a Deployment of the sample application, and of a plain Service with its name.
fn plain_service(name: &str) -> String {
    format!(
        "apiVersion: apps/v1
kind: Deployment
metadata: {{name: {name}}}
spec:
  selector: {{matchLabels: {{app: {name}}}}}
  template:
    metadata: {{labels: {{app: {name}}}}}
    spec:
      automountServiceAccountToken: false
      terminationGracePeriodSeconds: 1
      containers: [{{name: hello, image: \"{HELLO_IMAGE}\", imagePullPolicy: Never}}]
---
apiVersion: v1
kind: Service
metadata: {{name: {name}}}
spec:
  selector: {{app: {name}}}
  ports: [{{port: 80, targetPort: 8080}}]
"
    )
}

/// Checks the rows of the class, the Gateway and the route `shop` in the output of `kubectl get`.
fn check_printed(gateway: &TestGateway<'_>) {
    let class = gateway.namespace;
    let row = gateway.printed_cells(&["gatewayclass", class]);
    assert_eq!(row, [class, "rouse.dev/gateway", "True"]);
    let args = ["service", "--namespace", SYSTEM_NAMESPACE, "rouse-gateway"];
    let service = gateway.rouse.cluster.get(&args);
    let address = service["spec"]["clusterIP"].as_str().expect("it has an address");
    let row = gateway.printed_cells(&["gateway", GATEWAY]);
    assert_eq!(row, [GATEWAY, class, address, "True"]);
    let hosts = json!([gateway.host("shop")]).to_string();
    assert_eq!(gateway.printed_cells(&["httproute", "shop"]), ["shop", &hosts]);
}

/// Checks that requests below `/split` are shared by the weights of the backends.
fn check_split(gateway: &TestGateway<'_>, host: &str) {
    let url = format!("http://{}/split/[1-{SPLIT_REQUESTS}]", gateway.rouse.gateway());
    let host = format!("Host: {host}");
    // One process sends all requests, since curl counts through the range itself.
    let curl = ["curl", "--silent", "--show-error", "--noproxy", "*", "--max-time", "60"];
    let command = [&curl[..], &["--header", &host, &url]].concat();
    let of_shop = gateway.rouse.cluster.wait("responses of both services only", || {
        let output = gateway.rouse.cluster.run(&command).ok()?;
        let count = |service: &str| {
            let begin = format!("Hello from {service}-");
            output.lines().filter(|line| line.starts_with(&begin)).count()
        };
        let (of_shop, of_legacy) = (count("shop"), count("legacy"));
        (of_shop + of_legacy == SPLIT_REQUESTS).then_some(of_shop)
    });
    // Less than six standard deviations off. Equal shares would be eight off.
    assert!((115..=185).contains(&of_shop), "{of_shop} of {SPLIT_REQUESTS} for shop");
}

/// Checks that a route with a filter which is not supported is refused as a whole, until the filter is another one.
fn check_refusal(gateway: &TestGateway<'_>) {
    let host = gateway.host("refused");
    let route = |filter: &str| {
        let rules =
            format!("  - filters: [{{{filter}}}]\n    backendRefs: [{{name: shop, port: 80}}]\n");
        gateway.route_manifest("HTTPRoute", "refused", &rules)
    };
    let copy = "requestMirror: {backendRef: {name: legacy, port: 80}}";
    gateway.apply(&[route(&format!("type: RequestMirror, {copy}"))]);
    let condition = gateway.rouse.cluster.wait("a condition of the refused route", || {
        let condition = gateway.route_condition("httproute", "refused", "Accepted");
        condition.is_object().then_some(condition)
    });
    let fields = ["status", "reason", "message"].map(|field| condition[field].clone());
    let message = "filters of type RequestMirror are not supported";
    assert_eq!(fields, ["False", "UnsupportedValue", message]);
    assert_eq!(gateway.rouse.get_through_gateway(&host, "/", &[]).status, 404);

    let set = "requestHeaderModifier: {set: [{name: x-team, value: shop}]}";
    gateway.apply(&[route(&format!("type: RequestHeaderModifier, {set}"))]);
    gateway.wait_accepted("httproute", "refused");
    gateway.wait_response(&host, "/", &[], "shop");
    gateway.wait_programmed(2);
}

/// Deletes the routes and then the Gateway, and checks that neither hosts nor their certificate are left.
fn check_deletion(gateway: &TestGateway<'_>, clients: &TlsClients, host: &str) {
    let (rouse, namespace) = (gateway.rouse, gateway.namespace);
    let delete = |args: &[&str]| {
        let words = ["delete", "--namespace", namespace, "--timeout=300s"];
        rouse.cluster.kubectl(&[&words[..], args].concat()).expect("an object may be deleted");
    };
    delete(&["httproute", "--all"]);
    gateway.wait_unknown(host);
    gateway.wait_programmed(0);
    delete(&["gateway", GATEWAY]);
    wait_unserved(rouse, clients, &["-servername", host]);
    // The services stay as they are, also at the hosts of their own.
    gateway.wait_response(&format!("shop.{namespace}.example.com"), "/", &[], "shop");
    let deployment = gateway.get("deployment", "legacy");
    assert_eq!(deployment["status"]["readyReplicas"], 1, "{deployment}");
}

#[test]
fn routes_lead_to_a_service_that_sleeps_and_to_a_plain_one_until_they_are_deleted() {
    let rouse = RouseCluster::shared();
    let namespace = rouse.namespace("gateway-api");
    let gateway = TestGateway::new(&rouse, &namespace.name);
    let host = gateway.host("shop");
    let folder = tempfile::tempdir().expect("a folder");
    let files = TlsFiles::new(folder.path(), &[&host]);
    let clients = rouse.tls_clients(files.authority());
    let pair = files.issue();
    gateway.apply(&[
        gateway.manifest(Some(SECRET)),
        gateway.route_manifest("HTTPRoute", "shop", SHOP_RULES),
        service_manifest("shop", "", HELLO_CONTAINER),
        plain_service("legacy"),
        tls_secret(SECRET, &pair.chain_pem, &pair.key_pem),
    ]);
    rouse.wait_ready(&namespace.name, "ksvc", "shop");
    rouse.wait_asleep(&namespace.name, "shop");
    gateway.wait_accepted("httproute", "shop");
    gateway.wait_programmed(1);
    check_printed(&gateway);
    assert!(rouse.pods(&namespace.name, "shop").is_empty(), "a request has woken it");
    for (path, headers, service) in SHOP_REQUESTS {
        gateway.wait_response(&host, path, headers, service);
    }
    check_split(&gateway, &host);
    let certificate = first_certificate(&pair.chain_pem).expect("a certificate in PEM");
    wait_served(&rouse, &clients, &["-servername", &host], &certificate);
    assert_eq!(clients.curl(&host, &[]), "200 2");
    check_refusal(&gateway);
    check_deletion(&gateway, &clients, &host);
}

/// Calls a method of the health service of a host, from the network of a pod.
fn call_health(gateway: &TestGateway<'_>, host: &str, method: &str) -> Result<i32, Status> {
    let address = format!("http://{}", gateway.rouse.gateway());
    let (origin, path) = (format!("http://{host}"), format!("/grpc.health.v1.Health/{method}"));
    in_netns(gateway.rouse.client_on("node1").netns(), || {
        let runtime = Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(call_unary(address, &origin, &path))
    })
}

/// Sends an empty request, and returns the first field of the response.
async fn call_unary(address: String, origin: &str, path: &str) -> Result<i32, Status> {
    let failed = |error: Error| Status::unavailable(error.to_string());
    let endpoint = Endpoint::from_shared(address).map_err(failed)?;
    let endpoint = endpoint.origin(origin.parse().expect("a URL"));
    let mut client = Grpc::new(endpoint.connect().await.map_err(failed)?);
    client.ready().await.map_err(failed)?;
    // A message with one field has the bytes of the wrapper that prost reads as a plain value.
    let codec = tonic_prost::ProstCodec::<String, i32>::default();
    let path = path.parse().expect("a path");
    Ok(client.unary(Request::new(String::new()), path, codec).await?.into_inner())
}

#[test]
fn a_call_of_grpc_wakes_the_service_of_its_method() {
    let rouse = RouseCluster::shared();
    let namespace = rouse.namespace("grpc-route");
    let gateway = TestGateway::new(&rouse, &namespace.name);
    let host = gateway.host("calls");
    let container = format!("{HELLO_CONTAINER}, ports: [{{name: h2c, containerPort: 8080}}]");
    let rules = "  - matches: [{method: {service: grpc.health.v1.Health, method: Check}}]
    backendRefs: [{name: calls, port: 80}]
";
    gateway.apply(&[
        gateway.manifest(None),
        gateway.route_manifest("GRPCRoute", "calls", rules),
        service_manifest("calls", "", &container),
    ]);
    rouse.wait_ready(&namespace.name, "ksvc", "calls");
    rouse.wait_asleep(&namespace.name, "calls");
    gateway.wait_accepted("grpcroute", "calls");
    assert!(rouse.pods(&namespace.name, "calls").is_empty(), "a call has woken it");
    let health =
        rouse.cluster.wait("a response to a call", || call_health(&gateway, &host, "Check").ok());
    assert_eq!(health, SERVING);
    let status = call_health(&gateway, &host, "Watch").expect_err("no rule has the method");
    assert_eq!(status.code(), Code::Unimplemented, "{status:?}");
}
