//! Pure: the CustomResourceDefinitions, generated from the types in [`knative`](crate::knative).
//!
//! Names, short names, categories, columns and labels are Knative's (knative/serving `config/core/300-resources`,
//! knative/networking `config`, knative/caching `config`), so that tools and users find what they expect.

use schemars::JsonSchema;
use serde_json::{Value, json};

use crate::knative::{
    ConfigurationSpec, ConfigurationStatus, RevisionSpec, RevisionStatus, RouteSpec, RouteStatus,
    ServiceSpec, ServiceStatus,
    autoscaling::{MetricSpec, MetricStatus, PodAutoscalerSpec, PodAutoscalerStatus},
    caching::{ImageSpec, ImageStatus},
    domain::{DomainMappingSpec, DomainMappingStatus},
    networking::{
        ClusterDomainClaimSpec, EmptyStatus, ServerlessServiceSpec, ServerlessServiceStatus,
    },
};

mod lists;
mod rules;
mod schema;

/// One kind: names, columns and schemas of its definition.
struct CrdKind {
    group: &'static str,
    version: &'static str,
    kind: &'static str,
    plural: &'static str,
    short: &'static [&'static str],
    categories: &'static [&'static str],
    scope: &'static str,
    labels: &'static [&'static str],
    columns: &'static [PrinterColumn],
    about: &'static str,
    spec: Value,
    status: Value,
}

/// A column of `kubectl get`: title, type, JSON path.
type PrinterColumn = (&'static str, &'static str, &'static str);

const READY: PrinterColumn = ("Ready", "string", ".status.conditions[?(@.type=='Ready')].status");
const REASON: PrinterColumn = ("Reason", "string", ".status.conditions[?(@.type=='Ready')].reason");
const URL: PrinterColumn = ("URL", "string", ".status.url");
const CREATED: PrinterColumn = ("LatestCreated", "string", ".status.latestCreatedRevisionName");
const LATEST_READY: PrinterColumn = ("LatestReady", "string", ".status.latestReadyRevisionName");
const USER: &[&str] = &["all", "knative", "serving"];
const ADDRESSABLE: &str = "duck.knative.dev/addressable";
const PODSPECABLE: &str = "duck.knative.dev/podspecable";

/// All definitions, in a sensible order for readers.
pub fn all() -> Vec<Value> {
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
        image(),
    ];
    kinds.into_iter().map(definition).collect()
}

fn service() -> CrdKind {
    CrdKind {
        plural: "services",
        short: &["kservice", "ksvc"],
        labels: &[ADDRESSABLE, PODSPECABLE],
        columns: &[URL, CREATED, LATEST_READY, READY, REASON],
        about: "A service that runs on requests: a Configuration and a Route under one name.",
        ..serving::<ServiceSpec, ServiceStatus>("Service")
    }
}

fn configuration() -> CrdKind {
    CrdKind {
        plural: "configurations",
        short: &["config", "cfg"],
        labels: &[PODSPECABLE],
        columns: &[CREATED, LATEST_READY, READY, REASON],
        about: "The newest template of a service. Each change of it makes a Revision.",
        ..serving::<ConfigurationSpec, ConfigurationStatus>("Configuration")
    }
}

fn revision() -> CrdKind {
    CrdKind {
        plural: "revisions",
        short: &["rev"],
        columns: &[
            ("Config Name", "string", ".metadata.labels['serving\\.knative\\.dev/configuration']"),
            (
                "Generation",
                "string",
                ".metadata.labels['serving\\.knative\\.dev/configurationGeneration']",
            ),
            READY,
            REASON,
            ("Actual Replicas", "integer", ".status.actualReplicas"),
            ("Desired Replicas", "integer", ".status.desiredReplicas"),
        ],
        about: "One immutable version of code and configuration.",
        ..serving::<RevisionSpec, RevisionStatus>("Revision")
    }
}

fn route() -> CrdKind {
    CrdKind {
        plural: "routes",
        short: &["rt"],
        labels: &[ADDRESSABLE],
        columns: &[URL, READY, REASON],
        about: "Which Revisions a name leads to.",
        ..serving::<RouteSpec, RouteStatus>("Route")
    }
}

fn domain_mapping() -> CrdKind {
    CrdKind {
        version: "v1beta1",
        plural: "domainmappings",
        short: &["dm"],
        columns: &[URL, READY, REASON],
        about: "One more domain name for a service.",
        ..serving::<DomainMappingSpec, DomainMappingStatus>("DomainMapping")
    }
}

fn pod_autoscaler() -> CrdKind {
    CrdKind {
        group: "autoscaling.internal.knative.dev",
        plural: "podautoscalers",
        short: &["kpa", "pa"],
        categories: &["knative-internal", "autoscaling"],
        columns: &[
            ("DesiredScale", "integer", ".status.desiredScale"),
            ("ActualScale", "integer", ".status.actualScale"),
            READY,
            REASON,
        ],
        about: "How one Revision scales. Written by the controller.",
        ..internal::<PodAutoscalerSpec, PodAutoscalerStatus>("PodAutoscaler")
    }
}

fn metric() -> CrdKind {
    CrdKind {
        group: "autoscaling.internal.knative.dev",
        plural: "metrics",
        categories: &["knative-internal", "autoscaling"],
        columns: &[READY, REASON],
        about: "What of a Revision is measured. Written by the controller.",
        ..internal::<MetricSpec, MetricStatus>("Metric")
    }
}

fn serverless_service() -> CrdKind {
    CrdKind {
        group: "networking.internal.knative.dev",
        plural: "serverlessservices",
        short: &["sks"],
        categories: &["knative-internal", "networking"],
        columns: &[
            ("Mode", "string", ".spec.mode"),
            ("Activators", "integer", ".spec.numActivators"),
            ("ServiceName", "string", ".status.serviceName"),
            ("PrivateServiceName", "string", ".status.privateServiceName"),
            READY,
            REASON,
        ],
        about: "Where connections to a Revision lead. Written by the controller.",
        ..internal::<ServerlessServiceSpec, ServerlessServiceStatus>("ServerlessService")
    }
}

fn cluster_domain_claim() -> CrdKind {
    CrdKind {
        group: "networking.internal.knative.dev",
        plural: "clusterdomainclaims",
        short: &["cdc"],
        categories: &["knative-internal", "networking"],
        scope: "Cluster",
        columns: &[("Namespace", "string", ".spec.namespace")],
        about: "Which namespace may map a domain.",
        ..internal::<ClusterDomainClaimSpec, EmptyStatus>("ClusterDomainClaim")
    }
}

fn image() -> CrdKind {
    CrdKind {
        group: "caching.internal.knative.dev",
        plural: "images",
        short: &["img"],
        categories: &["knative-internal", "caching"],
        columns: &[("Image", "string", ".spec.image")],
        about: "An image that pods will want.",
        ..internal::<ImageSpec, ImageStatus>("Image")
    }
}

fn serving<S: JsonSchema, T: JsonSchema>(kind: &'static str) -> CrdKind {
    CrdKind {
        group: "serving.knative.dev",
        version: "v1",
        categories: USER,
        ..internal::<S, T>(kind)
    }
}

fn internal<S: JsonSchema, T: JsonSchema>(kind: &'static str) -> CrdKind {
    CrdKind {
        group: "",
        version: "v1alpha1",
        kind,
        plural: "",
        short: &[],
        categories: &[],
        scope: "Namespaced",
        labels: &[],
        columns: &[],
        about: "",
        spec: schema::of::<S>(),
        status: schema::of::<T>(),
    }
}

fn definition(it: CrdKind) -> Value {
    let name = format!("{}.{}", it.plural, it.group);
    let mut labels = json!({
        "app.kubernetes.io/part-of": "rouse",
        "knative.dev/crd-install": "true",
    });
    for label in it.labels {
        labels[*label] = "true".into();
    }
    let column = |(title, kind, path): &PrinterColumn| json!({"name": title, "type": kind, "jsonPath": path});
    let columns: Vec<Value> = it.columns.iter().map(column).collect();
    let mut root = json!({
        "type": "object",
        "description": it.about,
        "properties": {
            "apiVersion": {
                "type": "string",
                "description": "Group and version of the object.",
            },
            "kind": {"type": "string", "description": "Kind of the object."},
            "metadata": {"type": "object"},
            "spec": it.spec,
            "status": it.status,
        },
    });
    // Both address fields by their path from the root, so they come after the whole schema is built.
    rules::add(it.kind, &mut root);
    lists::mark(it.kind, &mut root);
    let mut version = json!({
        "name": it.version,
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
        "kind": it.kind,
        "plural": it.plural,
        "singular": it.kind.to_lowercase(),
        "categories": it.categories,
    });
    if !it.short.is_empty() {
        names["shortNames"] = json!(it.short);
    }
    json!({
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "group": it.group,
            "names": names,
            "scope": it.scope,
            "versions": [version],
        },
    })
}

#[cfg(test)]
mod tests;
