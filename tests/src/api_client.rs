//! Shell: reads of objects from the API server, by one HTTP client for each kubeconfig file.
//!
//! Tests poll objects every 100 ms. With a process of kubectl for each poll, these took 15 % of two processors.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::{LazyLock, Mutex, PoisonError, mpsc};
use std::thread;
use std::time::{Duration, SystemTime};

use controller::shell::api::client::connect;
use hyper::Request;
use kube::Client;
use kube::api::{GetParams, ListParams};
use nix::sched::{CloneFlags, setns};
use serde_json::{Value, json};
use tokio::runtime::{Builder, Runtime};
use tokio::time::{sleep, timeout};

/// Timeout of one try of a request. After the last try, a test that has stopped the API server goes on.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// Number of tries of a request without a response, or with one that a busy server sends.
const TRIES: u32 = 3;
/// Pause between two tries.
const RETRY_PAUSE: Duration = Duration::from_millis(500);

/// Runtime of all clients.
static RUNTIME: LazyLock<Runtime> = LazyLock::new(start_runtime);

/// Clients by kubeconfig file, each with the time of the file's last change: a file that was written again may lead to
/// another cluster.
static CLIENTS: Mutex<BTreeMap<PathBuf, (SystemTime, Client)>> = Mutex::new(BTreeMap::new());

/// Reads an object or a list, as `kubectl get ARGS --output json` prints it; null after an error. Returns `None` if
/// only kubectl itself understands the arguments or the kubeconfig file.
pub(crate) fn get(kubeconfig: &Path, args: &[&str]) -> Option<Value> {
    let query = ObjectQuery::parse(args)?;
    let requests = query.requests()?;
    let client = run_to_end(client_of(kubeconfig.to_owned()))?;
    let responses = run_to_end(fetch_all(client, requests));
    Some(responses.map_or(Value::Null, |it| query.join(it)))
}

/// Objects that the arguments of `kubectl get` choose.
#[derive(Debug)]
struct ObjectQuery<'a> {
    kinds: Vec<&'static ObjectKind>,
    /// Names of the objects; empty for all objects.
    names: Vec<&'a str>,
    /// Namespace of the objects; `None` for all namespaces.
    namespace: Option<&'a str>,
    label_selector: Option<&'a str>,
}

impl<'a> ObjectQuery<'a> {
    /// Parses the arguments; `None` if this client does not know one of them.
    fn parse(args: &[&'a str]) -> Option<Self> {
        let (kinds, names) = (Vec::new(), Vec::new());
        let mut query = Self { kinds, names, namespace: Some("default"), label_selector: None };
        let mut args = args.iter().copied();
        while let Some(arg) = args.next() {
            let (flag, value) = match arg.split_once('=') {
                Some((flag, value)) => (flag, Some(value)),
                None => (arg, None),
            };
            match flag {
                "--all-namespaces" => query.namespace = None,
                "--namespace" => query.namespace = Some(value.or_else(|| args.next())?),
                "--selector" => query.label_selector = Some(value.or_else(|| args.next())?),
                _ if arg.starts_with('-') || arg.contains('/') => return None,
                _ if query.kinds.is_empty() => {
                    query.kinds = arg.split(',').map(ObjectKind::find).collect::<Option<_>>()?;
                }
                _ => query.names.push(arg),
            }
        }
        // kubectl refuses names together with a selector or with all namespaces.
        let selects_all = query.names.is_empty();
        let selects_by_name = query.namespace.is_some() && query.label_selector.is_none();
        (!query.kinds.is_empty() && (selects_all || selects_by_name)).then_some(query)
    }

    /// Requests for the objects, in the order of kubectl's output; `None` if a name is invalid.
    fn requests(&self) -> Option<Vec<Request<Vec<u8>>>> {
        let params = ListParams::default();
        let list_params = match self.label_selector {
            Some(selector) => params.labels(selector),
            None => params,
        };
        let mut requests = Vec::new();
        for kind in &self.kinds {
            let builder = kube::core::Request::new(kind.path(self.namespace));
            if self.names.is_empty() {
                requests.push(builder.list(&list_params).ok()?);
            }
            for name in &self.names {
                requests.push(builder.get(name, &GetParams::default()).ok()?);
            }
        }
        Some(requests)
    }

    /// Joins the responses to one object or one list.
    fn join(&self, responses: Vec<Value>) -> Value {
        let mut objects: Vec<Value> = match self.names.is_empty() {
            true => responses.into_iter().flat_map(items_of).collect(),
            false => responses,
        };
        objects.iter_mut().for_each(remove_managed_fields);
        if self.kinds.len() == 1 && self.names.len() == 1 {
            return objects.pop().unwrap_or_default();
        }
        let metadata = json!({ "resourceVersion": "" });
        json!({ "apiVersion": "v1", "kind": "List", "metadata": metadata, "items": objects })
    }
}

/// Items of a list. The API server leaves out two fields of them that the list has, and kubectl adds these.
fn items_of(mut list: Value) -> Vec<Value> {
    let api_version = list["apiVersion"].clone();
    let kind = Value::from(list["kind"].as_str().and_then(|it| it.strip_suffix("List")));
    let items = list.get_mut("items").map(Value::take);
    let Some(Value::Array(mut items)) = items else { return Vec::new() };
    for item in items.iter_mut().filter_map(Value::as_object_mut) {
        item.entry("apiVersion").or_insert_with(|| api_version.clone());
        item.entry("kind").or_insert_with(|| kind.clone());
    }
    items
}

/// Removes the field that kubectl hides.
fn remove_managed_fields(object: &mut Value) {
    if let Some(metadata) = object.get_mut("metadata").and_then(Value::as_object_mut) {
        metadata.remove("managedFields");
    }
}

/// A kind of object that tests read.
#[derive(Debug)]
struct ObjectKind {
    /// Group and version, as in the field `apiVersion` of objects.
    api_version: &'static str,
    /// Lower-case plural, as in API paths.
    plural: &'static str,
    /// Other words of kubectl for the kind, separated by spaces.
    other_words: &'static str,
    is_namespaced: bool,
}

const fn namespaced(
    api_version: &'static str,
    plural: &'static str,
    other_words: &'static str,
) -> ObjectKind {
    ObjectKind { api_version, plural, other_words, is_namespaced: true }
}

const fn cluster_wide(
    api_version: &'static str,
    plural: &'static str,
    other_words: &'static str,
) -> ObjectKind {
    ObjectKind { api_version, plural, other_words, is_namespaced: false }
}

/// Kinds by kubectl's words. Of two kinds with one word kubectl takes the first: `services` are Kubernetes'.
const KINDS: &[ObjectKind] = &[
    namespaced("v1", "configmaps", "configmap cm"),
    namespaced("v1", "events", "event ev"),
    namespaced("v1", "pods", "pod po"),
    namespaced("v1", "resourcequotas", "resourcequota quota"),
    namespaced("v1", "secrets", "secret"),
    namespaced("v1", "services", "service svc"),
    cluster_wide("v1", "namespaces", "namespace ns"),
    cluster_wide("v1", "nodes", "node no"),
    namespaced("apps/v1", "daemonsets", "daemonset ds"),
    namespaced("apps/v1", "deployments", "deployment deploy"),
    namespaced("apps/v1", "replicasets", "replicaset rs"),
    namespaced("apps/v1", "statefulsets", "statefulset sts"),
    namespaced("autoscaling/v2", "horizontalpodautoscalers", "horizontalpodautoscaler hpa"),
    namespaced("coordination.k8s.io/v1", "leases", "lease"),
    namespaced("discovery.k8s.io/v1", "endpointslices", "endpointslice"),
    cluster_wide(
        "admissionregistration.k8s.io/v1",
        "mutatingwebhookconfigurations",
        "mutatingwebhookconfiguration",
    ),
    cluster_wide(
        "apiextensions.k8s.io/v1",
        "customresourcedefinitions",
        "customresourcedefinition crd crds",
    ),
    namespaced("serving.knative.dev/v1", "services", "kservice ksvc"),
    namespaced("serving.knative.dev/v1", "configurations", "configuration config cfg"),
    namespaced("serving.knative.dev/v1", "revisions", "revision rev"),
    namespaced("serving.knative.dev/v1", "routes", "route rt"),
    namespaced("serving.knative.dev/v1beta1", "domainmappings", "domainmapping dm"),
    namespaced(
        "autoscaling.internal.knative.dev/v1alpha1",
        "podautoscalers",
        "podautoscaler kpa pa",
    ),
    namespaced("autoscaling.internal.knative.dev/v1alpha1", "metrics", "metric"),
    namespaced(
        "networking.internal.knative.dev/v1alpha1",
        "serverlessservices",
        "serverlessservice sks",
    ),
    // Tests name these two with their groups, since Knative has kinds of the same names.
    namespaced("networking.k8s.io/v1", "ingresses", "ingress ing"),
    namespaced("cert-manager.io/v1", "certificates", "certificate"),
    namespaced("networking.internal.knative.dev/v1alpha1", "ingresses", "kingress king"),
    namespaced("networking.internal.knative.dev/v1alpha1", "certificates", "kcert"),
    namespaced("caching.internal.knative.dev/v1alpha1", "images", "image img"),
    cluster_wide("gateway.networking.k8s.io/v1", "gatewayclasses", "gatewayclass gc"),
    namespaced("gateway.networking.k8s.io/v1", "gateways", "gateway gtw"),
    namespaced("gateway.networking.k8s.io/v1", "grpcroutes", "grpcroute"),
    namespaced("gateway.networking.k8s.io/v1", "httproutes", "httproute"),
];

impl ObjectKind {
    /// Finds the kind that kubectl means by `word`, which may be `PLURAL.GROUP`.
    fn find(word: &str) -> Option<&'static Self> {
        let has_word = |it: &&Self| {
            it.plural == word
                || it.other_words.split(' ').any(|other| other == word)
                || word.split_once('.').is_some_and(|pair| pair == (it.plural, it.group()))
        };
        KINDS.iter().find(has_word)
    }

    /// API group; empty for the core group.
    fn group(&self) -> &'static str {
        self.api_version.split_once('/').map_or("", |(group, _)| group)
    }

    /// Path of the objects in a namespace, or of all objects.
    fn path(&self, namespace: Option<&str>) -> String {
        let Self { api_version, plural, .. } = self;
        let root = if self.group().is_empty() { "api" } else { "apis" };
        match namespace.filter(|_| self.is_namespaced) {
            Some(namespace) => format!("/{root}/{api_version}/namespaces/{namespace}/{plural}"),
            None => format!("/{root}/{api_version}/{plural}"),
        }
    }
}

/// Runs `work` on the runtime. Waits for the result by blocking, so that tests may call it on any thread, also on one
/// of another runtime.
fn run_to_end<T: Send + 'static>(work: impl Future<Output = T> + Send + 'static) -> T {
    let (sender, receiver) = mpsc::channel();
    RUNTIME.spawn(async move {
        let result = work.await;
        sender.send(result)
    });
    receiver.recv().expect("a read does not panic")
}

/// Starts the runtime, which opens all connections on a thread of its own.
fn start_runtime() -> Runtime {
    let build = || {
        enter_host_netns();
        Builder::new_multi_thread().worker_threads(1).enable_all().build()
    };
    // Threads inherit the network namespace of the thread that starts them: here one of this function, not the test's.
    let built = thread::spawn(build).join().expect("root may enter the host's namespace");
    built.expect("a thread can be started")
}

/// Moves this thread into the network namespace of the process's first thread, which no test changes.
fn enter_host_netns() {
    let (own, host) = ("/proc/thread-self/ns/net", "/proc/self/ns/net");
    let id = |path: &str| fs::read_link(path).expect("a thread has a network namespace");
    if id(own) != id(host) {
        let namespace = File::open(host).expect("a process has a network namespace");
        setns(namespace, CloneFlags::CLONE_NEWNET).expect("root may enter it");
    }
}

/// Returns the kept client, or makes it; `None` if none can be made from the file.
async fn client_of(kubeconfig: PathBuf) -> Option<Client> {
    let changed_at = fs::metadata(&kubeconfig).and_then(|it| it.modified()).ok()?;
    if let Some(client) = kept_client(&kubeconfig, changed_at) {
        return Some(client);
    }
    let client = connect(Some(kubeconfig.as_path())).await.ok()?;
    let mut clients = CLIENTS.lock().unwrap_or_else(PoisonError::into_inner);
    clients.insert(kubeconfig, (changed_at, client.clone()));
    Some(client)
}

fn kept_client(kubeconfig: &Path, changed_at: SystemTime) -> Option<Client> {
    let clients = CLIENTS.lock().unwrap_or_else(PoisonError::into_inner);
    let (made_from, client) = clients.get(kubeconfig)?;
    (*made_from == changed_at).then(|| client.clone())
}

/// Bodies of the responses to all requests; `None` if one of them failed.
async fn fetch_all(client: Client, requests: Vec<Request<Vec<u8>>>) -> Option<Vec<Value>> {
    let mut bodies = Vec::new();
    for request in requests {
        bodies.push(fetch(&client, request).await?);
    }
    Some(bodies)
}

/// Body of the response to one request; `None` for an error.
async fn fetch(client: &Client, request: Request<Vec<u8>>) -> Option<Value> {
    for _ in 0..TRIES {
        match timeout(REQUEST_TIMEOUT, client.request::<Value>(request.clone())).await {
            Ok(Ok(body)) => return Some(body),
            Ok(Err(kube::Error::Api(status))) if !is_of_busy_server(status.code) => return None,
            // A kept connection may also end with its API server in this moment. The next try opens another one.
            Ok(Err(_)) | Err(_) => sleep(RETRY_PAUSE).await,
        }
    }
    None
}

/// Returns true for statuses that say nothing about the object: too many requests, or a failed server or etcd.
fn is_of_busy_server(status: u16) -> bool {
    status == 429 || status >= 500
}
