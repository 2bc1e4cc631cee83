//! Pure: Ingresses that the controller has made for Routes, as the API server holds them. Other controllers serve them.

use std::collections::BTreeMap;

use common::wire::NamespacedName;

use super::{ConditionStatus, Uid};

/// Ingresses of Routes, by name. Each has the name of its Route.
#[derive(Clone, Debug, Default)]
pub struct ObservedIngresses {
    /// Ingresses that the controller has made.
    pub by_name: BTreeMap<NamespacedName, IngressState>,
    /// True once all Ingresses were listed. Before that, one that is not known may exist.
    pub is_listed: bool,
}

/// An Ingress that the controller has made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IngressState {
    /// UID of the owner with `controller: true`; `None`: it has none.
    pub owner_uid: Option<Uid>,
    /// Class of the ingress that serves it.
    pub class: Box<str>,
    /// Hash of its spec, as the controller wrote it; `None`: it has none.
    pub spec_hash: Option<u64>,
    /// Condition `Ready`, as far as it is about the present spec; `None`: its controller has not handled this spec.
    pub readiness: Option<ConditionStatus>,
    /// True once the object is being deleted.
    pub is_terminating: bool,
}
