//! The network of one rank among equals: the same weights at the start, the mean of all gradients after each backward pass.

use drumline::{ProcessGroup, ReduceOp};
use drumline_torch::{Named, buffers, grad, parameters};
use tch::nn::{ModuleT, VarStore};
use tch::{Kind, Tensor, no_grad};

pub(in crate::program) struct Replica<'a> {
    net: Box<dyn ModuleT>,
    parameters: Vec<Named>,
    buffers: Vec<Named>,
    group: &'a ProcessGroup,
}

impl<'a> Replica<'a> {
    /// Takes rank 0's weights on all ranks.
    pub(in crate::program) fn new(
        net: Box<dyn ModuleT>,
        store: &VarStore,
        group: &'a ProcessGroup,
    ) -> anyhow::Result<Self> {
        let replica = Self { net, parameters: parameters(store), buffers: buffers(store), group };
        for named in replica.parameters.iter().chain(&replica.buffers) {
            from_first(&named.tensor, group)?;
        }
        Ok(replica)
    }

    pub(in crate::program) fn forward_t(&self, images: &Tensor, train: bool) -> anyhow::Result<Tensor> {
        Ok(self.net.forward_t(images, train))
    }

    /// Gradients of the mean loss over the samples of all ranks, where all have as many.
    pub(in crate::program) fn backward(&self, loss: &Tensor) -> anyhow::Result<()> {
        loss.f_backward()?;
        if self.group.size() == 1 {
            return Ok(());
        }
        for named in &self.parameters {
            let Some(mut grad) = grad(&named.tensor)? else { continue };
            let mut values = Vec::<f32>::try_from(&grad.flatten(0, -1).to_kind(Kind::Float))?;
            self.group.all_reduce(&mut values, ReduceOp::Avg)?;
            let mean = Tensor::from_slice(&values).view_as(&grad);
            no_grad(|| grad.copy_(&mean));
        }
        Ok(())
    }

    /// Running means as rank 0 has them.
    pub(in crate::program) fn share_buffers(&self) -> anyhow::Result<()> {
        self.buffers.iter().try_for_each(|named| from_first(&named.tensor, self.group))
    }
}

fn from_first(tensor: &Tensor, group: &ProcessGroup) -> anyhow::Result<()> {
    let mut values = Vec::<f64>::try_from(&tensor.detach().flatten(0, -1).to_kind(Kind::Double))?;
    group.broadcast(&mut values, 0)?;
    let shared = Tensor::from_slice(&values).view_as(tensor);
    no_grad(|| tensor.shallow_clone().copy_(&shared));
    Ok(())
}
