//! Pure: the CustomResourceDefinitions, generated from the types in [`knative`](crate::model::knative).
//!
//! Names, short names, categories, columns and labels are Knative's, so that tools and users find what they expect.
//! They are in `config/core/300-resources` of knative/serving, and in `config` of knative/networking and
//! knative/caching.
//!
//! kube's `#[derive(CustomResource)]` was tried for the table of kinds and not taken. Its attributes need 20 lines for a
//! Service where the table has 13. Its schema has 346 kB, with every field of a pod, and requires names of containers,
//! which Knative does not. So the conversion, the merge types and the rules in the modules here would all remain.

use schemars::JsonSchema;
use serde_json::{Value, json};

use crate::model::knative::{
    ConfigurationSpec, ConfigurationStatus, RevisionSpec, RevisionStatus, RouteSpec, RouteStatus,
    ServiceSpec, ServiceStatus,
    autoscaling::{MetricSpec, MetricStatus, PodAutoscalerSpec, PodAutoscalerStatus},
    caching::{ImageSpec, ImageStatus},
    domain_mapping::{DomainMappingSpec, DomainMappingStatus},
    networking::{
        CertificateSpec, CertificateStatus, ClusterDomainClaimSpec, EmptyStatus,
        KnativeIngressSpec, KnativeIngressStatus, ServerlessServiceSpec, ServerlessServiceStatus,
    },
};

mod merge_types;
mod structural_schema;
mod validation_rules;

/// One kind: names, columns and schemas of its definition.
struct CrdKind {
    group: &'static str,
    version: &'static str,
    kind: &'static str,
    plural: &'static str,
    short_names: &'static [&'static str],
    categories: &'static [&'static str],
    scope: &'static str,
    labels: &'static [&'static str],
    columns: &'static [PrinterColumn],
    description: &'static str,
    spec: Value,
    status: Value,
}

/// A column of `kubectl get`: title, type, JSON path.
type PrinterColumn = (&'static str, &'static str, &'static str);

const READY_COLUMN: PrinterColumn =
    ("Ready", "string", ".status.conditions[?(@.type=='Ready')].status");
const REASON_COLUMN: PrinterColumn =
    ("Reason", "string", ".status.conditions[?(@.type=='Ready')].reason");
const URL_COLUMN: PrinterColumn = ("URL", "string", ".status.url");
const LATEST_CREATED_COLUMN: PrinterColumn =
    ("LatestCreated", "string", ".status.latestCreatedRevisionName");
const LATEST_READY_COLUMN: PrinterColumn =
    ("LatestReady", "string", ".status.latestReadyRevisionName");
const USER_CATEGORIES: &[&str] = &["all", "knative", "serving"];
const ADDRESSABLE_LABEL: &str = "duck.knative.dev/addressable";
const PODSPECABLE_LABEL: &str = "duck.knative.dev/podspecable";

/// All definitions, in a sensible order for readers.
pub fn all_definitions() -> Vec<Value> {
    let kinds = [
        service(),
        configuration(),
        revision(),
        route(),
        domain_mapping(),
        pod_autoscaler(),
        metric(),
        serverless_service(),
        cluster_domain_claim(),
        certificate(),
        ingress(),
        image(),
    ];
    kinds.into_iter().map(kind_definition).collect()
}

fn service() -> CrdKind {
    CrdKind {
        plural: "services",
        short_names: &["kservice", "ksvc"],
        labels: &[ADDRESSABLE_LABEL, PODSPECABLE_LABEL],
        columns: &[
            URL_COLUMN,
            LATEST_CREATED_COLUMN,
            LATEST_READY_COLUMN,
            READY_COLUMN,
            REASON_COLUMN,
        ],
        description: "A service that runs on requests: a Configuration and a Route under one name.",
        ..serving_kind::<ServiceSpec, ServiceStatus>("Service")
    }
}

fn configuration() -> CrdKind {
    CrdKind {
        plural: "configurations",
        short_names: &["config", "cfg"],
        labels: &[PODSPECABLE_LABEL],
        columns: &[LATEST_CREATED_COLUMN, LATEST_READY_COLUMN, READY_COLUMN, REASON_COLUMN],
        description: "The newest template of a service. Each change of it makes a Revision.",
        ..serving_kind::<ConfigurationSpec, ConfigurationStatus>("Configuration")
    }
}

fn revision() -> CrdKind {
    CrdKind {
        plural: "revisions",
        short_names: &["rev"],
        columns: &[
            ("Config Name", "string", ".metadata.labels['serving\\.knative\\.dev/configuration']"),
            (
                "Generation",
                "string",
                ".metadata.labels['serving\\.knative\\.dev/configurationGeneration']",
            ),
            READY_COLUMN,
            REASON_COLUMN,
            ("Actual Replicas", "integer", ".status.actualReplicas"),
            ("Desired Replicas", "integer", ".status.desiredReplicas"),
        ],
        description: "One immutable version of code and configuration.",
        ..serving_kind::<RevisionSpec, RevisionStatus>("Revision")
    }
}

fn route() -> CrdKind {
    CrdKind {
        plural: "routes",
        short_names: &["rt"],
        labels: &[ADDRESSABLE_LABEL],
        columns: &[URL_COLUMN, READY_COLUMN, REASON_COLUMN],
        description: "Revisions to which a name leads.",
        ..serving_kind::<RouteSpec, RouteStatus>("Route")
    }
}

fn domain_mapping() -> CrdKind {
    CrdKind {
        version: "v1beta1",
        plural: "domainmappings",
        short_names: &["dm"],
        columns: &[URL_COLUMN, READY_COLUMN, REASON_COLUMN],
        description: "One more domain name for a service.",
        ..serving_kind::<DomainMappingSpec, DomainMappingStatus>("DomainMapping")
    }
}

fn pod_autoscaler() -> CrdKind {
    CrdKind {
        group: "autoscaling.internal.knative.dev",
        plural: "podautoscalers",
        short_names: &["kpa", "pa"],
        categories: &["knative-internal", "autoscaling"],
        columns: &[
            ("DesiredScale", "integer", ".status.desiredScale"),
            ("ActualScale", "integer", ".status.actualScale"),
            ("Standby", "integer", ".status.standbyScale"),
            READY_COLUMN,
            REASON_COLUMN,
        ],
        description: "Scaling of one Revision. Written by the controller.",
        ..internal_kind::<PodAutoscalerSpec, PodAutoscalerStatus>("PodAutoscaler")
    }
}

fn metric() -> CrdKind {
    CrdKind {
        group: "autoscaling.internal.knative.dev",
        plural: "metrics",
        categories: &["knative-internal", "autoscaling"],
        columns: &[READY_COLUMN, REASON_COLUMN],
        description: "Load metric of one Revision, for Knative's autoscaler. Rouse writes none.",
        ..internal_kind::<MetricSpec, MetricStatus>("Metric")
    }
}

fn serverless_service() -> CrdKind {
    CrdKind {
        group: "networking.internal.knative.dev",
        plural: "serverlessservices",
        short_names: &["sks"],
        categories: &["knative-internal", "networking"],
        columns: &[
            ("Mode", "string", ".spec.mode"),
            ("Activators", "integer", ".spec.numActivators"),
            ("ServiceName", "string", ".status.serviceName"),
            ("PrivateServiceName", "string", ".status.privateServiceName"),
            READY_COLUMN,
            REASON_COLUMN,
        ],
        description: "Path of connections to one Revision. Written by the controller.",
        ..internal_kind::<ServerlessServiceSpec, ServerlessServiceStatus>("ServerlessService")
    }
}

fn cluster_domain_claim() -> CrdKind {
    CrdKind {
        group: "networking.internal.knative.dev",
        plural: "clusterdomainclaims",
        short_names: &["cdc"],
        categories: &["knative-internal", "networking"],
        scope: "Cluster",
        columns: &[("Namespace", "string", ".spec.namespace")],
        description: "Namespace that may map a domain.",
        ..internal_kind::<ClusterDomainClaimSpec, EmptyStatus>("ClusterDomainClaim")
    }
}

fn certificate() -> CrdKind {
    CrdKind {
        group: "networking.internal.knative.dev",
        plural: "certificates",
        short_names: &["kcert"],
        categories: &["knative-internal", "networking"],
        columns: &[READY_COLUMN, REASON_COLUMN],
        description: "Certificate that is requested for a host. Written by the controller.",
        ..internal_kind::<CertificateSpec, CertificateStatus>("Certificate")
    }
}

fn ingress() -> CrdKind {
    CrdKind {
        group: "networking.internal.knative.dev",
        plural: "ingresses",
        short_names: &["kingress", "king"],
        categories: &["knative-internal", "networking"],
        columns: &[READY_COLUMN, REASON_COLUMN],
        description: "Hosts of a Route for the controller of another ingress. Written by the controller.",
        ..internal_kind::<KnativeIngressSpec, KnativeIngressStatus>("Ingress")
    }
}

fn image() -> CrdKind {
    CrdKind {
        group: "caching.internal.knative.dev",
        plural: "images",
        short_names: &["img"],
        categories: &["knative-internal", "caching"],
        columns: &[("Image", "string", ".spec.image")],
        description: "Image that pods of a Revision will need, for image caches.",
        ..internal_kind::<ImageSpec, ImageStatus>("Image")
    }
}

fn serving_kind<S: JsonSchema, T: JsonSchema>(kind: &'static str) -> CrdKind {
    CrdKind {
        group: "serving.knative.dev",
        version: "v1",
        categories: USER_CATEGORIES,
        ..internal_kind::<S, T>(kind)
    }
}

fn internal_kind<S: JsonSchema, T: JsonSchema>(kind: &'static str) -> CrdKind {
    CrdKind {
        group: "",
        version: "v1alpha1",
        kind,
        plural: "",
        short_names: &[],
        categories: &[],
        scope: "Namespaced",
        labels: &[],
        columns: &[],
        description: "",
        spec: structural_schema::structural_schema::<S>(),
        status: structural_schema::structural_schema::<T>(),
    }
}

/// Returns the CustomResourceDefinition of a kind, with its schema, rules and columns.
fn kind_definition(crd: CrdKind) -> Value {
    let name = format!("{}.{}", crd.plural, crd.group);
    let mut labels = json!({
        "app.kubernetes.io/part-of": "rouse",
        "knative.dev/crd-install": "true",
    });
    for label in crd.labels {
        labels[*label] = "true".into();
    }
    let column = |(title, kind, path): &PrinterColumn| json!({"name": title, "type": kind, "jsonPath": path});
    let columns: Vec<Value> = crd.columns.iter().map(column).collect();
    let mut root = json!({
        "type": "object",
        "description": crd.description,
        "properties": {
            "apiVersion": {
                "type": "string",
                "description": "Group and version of the object.",
            },
            "kind": {"type": "string", "description": "Kind of the object."},
            "metadata": {"type": "object"},
            "spec": crd.spec,
            "status": crd.status,
        },
    });
    // Both find fields by their path from the root, so the whole schema is built before.
    validation_rules::add_rules(crd.kind, &mut root);
    merge_types::add_merge_types(crd.kind, &mut root);
    let mut version = json!({
        "name": crd.version,
        "served": true,
        "storage": true,
        // Only with this subresource is a status out of reach for writes of the spec.
        "subresources": {"status": {}},
        "schema": {"openAPIV3Schema": root},
    });
    if !columns.is_empty() {
        version["additionalPrinterColumns"] = columns.into();
    }
    let mut names = json!({
        "kind": crd.kind,
        "plural": crd.plural,
        "singular": crd.kind.to_lowercase(),
        "categories": crd.categories,
    });
    if !crd.short_names.is_empty() {
        names["shortNames"] = json!(crd.short_names);
    }
    json!({
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "group": crd.group,
            "names": names,
            "scope": crd.scope,
            "versions": [version],
        },
    })
}

#[cfg(test)]
mod tests;
