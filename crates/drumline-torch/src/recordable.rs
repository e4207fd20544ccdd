//! Why work cannot be recorded in a CUDA graph.

/// Why work cannot be recorded in a CUDA graph.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NotRecordable {
    /// The collectives of a group go through host memory.
    #[error("{0}, so collectives go through host memory")]
    ThroughHost(HostRoute),
    /// The collectives of a group stay on the GPU that its ranks share, and hosts agree on each of them.
    #[error("{0}, so their hosts agree on each collective; try DRUMLINE_SHARED_GPU=nccl")]
    HostsAgree(HostRoute),
    /// A group chooses the route of its collectives in the first one on a GPU's tensor, and has not made one.
    #[error("group `{group}` has made no collective on a GPU's tensor yet")]
    NoCollectiveYet {
        /// The group.
        group: String,
    },
    /// The optimizer's state of a parameter would be created in the recording.
    #[error(
        "parameter `{parameter}` would make its first step in a graph, and each launch would reset the optimizer's state of it; \
         try a step before the recording in which it has a gradient"
    )]
    FirstStep {
        /// The parameter.
        parameter: String,
    },
    /// The optimizer counts steps on the host, and each launch of a graph would make the same step.
    #[error("the optimizer's step of parameter `{parameter}` depends on numbers that the host computes")]
    HostSteps {
        /// The parameter.
        parameter: String,
    },
    /// The master copy of a parameter would be refreshed in the recording, and so again by each launch.
    #[error(
        "parameter `{parameter}` has changed since its f32 copy was made; \
         try refresh_master_weights, or a step, before the recording"
    )]
    StaleMasterWeight {
        /// The parameter.
        parameter: String,
    },
    /// Activations are copied to new memory of the host, which a recording cannot allocate.
    #[error("activations are offloaded to host memory; try a checkpoint instead")]
    OffloadedActivations,
    /// A checkpoint computes its function again, and would draw other random numbers.
    #[error(
        "`{operation}` draws random numbers in an activation checkpoint, and in a graph they cannot be drawn again; \
         try drumline's dropout in a scope of Masks, keep_drawn, or no checkpoint"
    )]
    RandomInCheckpoint {
        /// The operation.
        operation: String,
    },
}

/// Why the collectives of GPU ranks go through host memory instead of NCCL.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum HostRoute {
    /// A rank has no NCCL.
    #[error("rank {rank} cannot use NCCL ({reason})")]
    NoNccl {
        /// The rank.
        rank: usize,
        /// Its error.
        reason: String,
    },
    /// Several ranks use one GPU, which NCCL does not allow.
    #[error("ranks {} share the GPU {bus}", .ranks.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "))]
    SharedGpu {
        /// The ranks.
        ranks: Vec<usize>,
        /// The GPU's address on the PCI bus.
        bus: String,
    },
    /// Ranks have different versions of NCCL.
    #[error("rank 0 has NCCL {first}, rank {rank} has {version}")]
    NcclVersions {
        /// The version of rank 0.
        first: String,
        /// The first rank that has another one.
        rank: usize,
        /// Its version.
        version: String,
    },
}
