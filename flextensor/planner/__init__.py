"""Profile + budget -> Plan. Pure Python: no streams, no device, no clock."""
