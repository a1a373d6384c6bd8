"""Training recipes: what connects a trainer to the rollout service. They import `prorl_gym.client` and `types` only."""
