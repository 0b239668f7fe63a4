"""The host weights: one immutable, unit-addressed file a model; private or shared; loading; pinning."""
