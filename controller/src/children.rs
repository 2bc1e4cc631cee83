//! Pure: the objects that Kubernetes must hold for a Revision and a Route, each whole, from plain inputs.
//!
//! What a service with one Revision and one container costs in objects: Service, Configuration, Route, Revision,
//! Deployment and its ReplicaSet, PodAutoscaler, ServerlessService, Image, the Services `<revision>`,
//! `<revision>-private` (with the EndpointSlice Kubernetes makes for it) and `<route>` with ours: fourteen, fifteen
//! where addresses have two families and the route needs a second slice. There is no Metric: only Knative's own
//! autoscaler, which scrapes by it, ever read one. `<revision>` has no slice: requests enter by a route, and its name
//! is what tools look for.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use serde::Serialize;
use serde_json::{Value, json};

use crate::knative::RevisionSpec;

pub mod deployment;
pub mod hpa;
pub mod images;
pub mod meta;
pub mod names;
pub mod pod;
pub mod resource;
pub mod scaling;
pub mod services;
pub mod slices;
pub mod subset;

pub use names::{child_name, tagged};
pub use resource::Resource;

/// A whole object, ready to be applied.
#[derive(Clone, Debug, PartialEq)]
pub struct Object {
    /// What it is.
    pub resource: Resource,
    /// Its namespace; empty for one of the whole cluster.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// `apiVersion`, `kind`, `metadata`, and the rest.
    pub body: Value,
}

impl Object {
    /// An object with these fields beside its metadata.
    pub(crate) fn new(resource: Resource, meta: ObjectMeta, rest: impl Serialize) -> Self {
        let (namespace, name) = (meta.namespace.clone(), meta.name.clone());
        let mut body = value(rest);
        if let Value::Object(fields) = &mut body {
            fields.insert("apiVersion".into(), json!(resource.api_version()));
            fields.insert("kind".into(), json!(resource.kind()));
            fields.insert("metadata".into(), value(meta));
        }
        let namespace = namespace.unwrap_or_default();
        Self { resource, namespace, name: name.unwrap_or_default(), body }
    }
}

fn value(it: impl Serialize) -> Value {
    // Types of an API always fit in JSON; one that did not would be refused by the API server as `null`.
    serde_json::to_value(it).unwrap_or_default()
}

/// The object that controls another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Owner<'a> {
    /// What it is.
    pub resource: Resource,
    /// Its name.
    pub name: &'a str,
    /// Its UID.
    pub uid: &'a str,
}

impl Owner<'_> {
    /// As the owned object names it.
    pub fn reference(&self) -> OwnerReference {
        OwnerReference {
            api_version: self.resource.api_version(),
            kind: self.resource.kind().into(),
            name: self.name.into(),
            uid: self.uid.into(),
            controller: Some(true),
            block_owner_deletion: Some(true),
        }
    }
}

/// A Revision, as far as its children depend on it.
#[derive(Clone, Copy, Debug)]
pub struct Revision<'a> {
    /// Its namespace.
    pub namespace: &'a str,
    /// Its name.
    pub name: &'a str,
    /// Its UID.
    pub uid: &'a str,
    /// The Service it came from; empty without one.
    pub service: &'a str,
    /// The Configuration it came from.
    pub configuration: &'a str,
    /// Its labels.
    pub labels: &'a BTreeMap<String, String>,
    /// Its annotations.
    pub annotations: &'a BTreeMap<String, String>,
    /// What it runs, with every default filled in.
    pub spec: &'a RevisionSpec,
    /// Images by digest, by container; a container that is not named keeps its tag.
    pub digests: &'a [(Box<str>, Box<str>)],
}

impl<'a> Revision<'a> {
    /// As owner of its children.
    pub fn owner(&self) -> Owner<'a> {
        Owner { resource: Resource::Revision, name: self.name, uid: self.uid }
    }

    /// Whether its pods speak HTTP/2 without TLS.
    pub fn h2c(&self) -> bool {
        let containers = &self.spec.pod.containers;
        let ports = containers.iter().flat_map(|it| it.ports.iter().flatten());
        ports.clone().any(|port| port.name.as_deref() == Some("h2c"))
    }

    fn image(&self, container: &str) -> Option<&str> {
        let known = self.digests.iter().find(|(name, _)| **name == *container);
        known.map(|(_, image)| &**image).filter(|image| image.contains('@'))
    }
}

/// What operators may choose, from `config-deployment`, `config-defaults` and `config-features`.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// How long a start may take, in seconds (`progress-deadline`).
    pub progress_deadline_seconds: i32,
    /// Whether pods of a Revision rather stand on different nodes (`default-affinity-type`).
    pub spread_over_nodes: bool,
    /// Runtime classes with the labels a pod must have for each (`runtime-class-name`).
    pub runtime_classes: BTreeMap<String, BTreeMap<String, String>>,
    /// Whether pods see Services as variables where the user does not say (`enable-service-links`).
    pub service_links: Option<bool>,
    /// Whether pods whose service names no account get its token (`automount-service-account-token`).
    pub automount_token: Option<bool>,
    /// Whether probes may ask another port than the serving one (`multi-container-probing`).
    pub probe_any_port: bool,
    /// Whether a pod stops only when the agent says that nothing is in flight.
    pub wait_for_drain: bool,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            progress_deadline_seconds: 600,
            spread_over_nodes: true,
            runtime_classes: BTreeMap::new(),
            service_links: Some(false),
            automount_token: None,
            probe_any_port: false,
            wait_for_drain: true,
        }
    }
}

/// What of a Revision changes without its spec.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parts {
    /// Pods a new Deployment starts with.
    pub replicas: i32,
    /// Whether a route leads to it.
    pub reachability: scaling::Reachability,
    /// Which way new connections go.
    pub mode: scaling::Mode,
    /// How many activators take part.
    pub activators: i32,
}

/// Everything that is made for a Revision.
pub fn of_revision(revision: &Revision<'_>, config: &Config, parts: &Parts) -> Vec<Object> {
    let mut all = vec![
        deployment::deployment(revision, config, parts.replicas),
        services::private(revision),
        services::public(revision),
        scaling::autoscaler(revision, parts.reachability),
        scaling::serverless_service(revision, parts.mode, parts.activators),
    ];
    all.extend(images::images(revision));
    all
}

#[cfg(test)]
mod tests;
